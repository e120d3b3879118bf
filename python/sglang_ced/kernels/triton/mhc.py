"""Hyper-connections: the mixes' products by slices of the inputs, then their sum, norm and Sinkhorn in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ced.kernels import mhc
from sglang_ced.kernels.mhc import NORM_EPS
from sglang_ced.kernels.triton.norm import inverse_rms
from sglang_ced.kernels.triton.numbers import UNFUSED, dot, narrow, widen

SLICE = 1024  # inputs of a program of the first kernel: few rows still fill the GPU
MOST_STREAMS = 8
BLOCK = 1024


@triton.jit
def _slice_sums(
    streams: tl.tensor,
    fn: tl.tensor,
    sums: tl.tensor,
    squares: tl.tensor,
    T: tl.tensor,
    K: tl.tensor,
    OUT: tl.constexpr,
    OUT_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SLICE: tl.constexpr,
) -> None:
    """Slice s of x [T, K] by fn [OUT, K] -> sums [slices, T, OUT] and squares [slices, T]."""
    slice, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, OUT_SLOTS)
    total, square = tl.zeros((ROWS, OUT_SLOTS), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, SLICE, WIDTH):
        k = slice * SLICE + start + tl.arange(0, WIDTH)
        place = row.to(tl.int64)[:, None] * K + k[None, :]
        x = widen(tl.load(streams + place, mask=(row < T)[:, None] & (k < K)[None, :], other=0.0))
        weight = tl.load(fn + n[:, None] * K + k[None, :], mask=(n < OUT)[:, None] & (k < K)[None, :], other=0.0)
        total = dot(x, tl.trans(weight), total)
        square += x * x
    base = slice.to(tl.int64) * T + row
    tl.store(sums + base[:, None] * OUT + n[None, :], total, mask=(row < T)[:, None] & (n < OUT)[None, :])
    tl.store(squares + base, tl.sum(square, axis=1), mask=row < T)


@triton.jit
def _mixes(
    sums: tl.tensor,
    squares: tl.tensor,
    base: tl.tensor,
    scale: tl.tensor,
    pre: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    T: tl.tensor,
    K: tl.tensor,
    slices: tl.tensor,
    iters: tl.tensor,
    eps: tl.tensor,
    norm_eps: tl.tensor,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    OUT: tl.constexpr = N * (N + 2)
    row, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SLOTS)
    is_row, square = row < T, tl.zeros((ROWS,), tl.float32)
    n = i[None, :]
    inside = is_row[:, None] & (n < N)
    pair = 2 * N + i[None, :, None] * N + i[None, None, :]
    is_pair = (i[None, :, None] < N) & (i[None, None, :] < N)
    first, second = tl.zeros((ROWS, SLOTS), tl.float32), tl.zeros((ROWS, SLOTS), tl.float32)
    mixed = tl.zeros((ROWS, SLOTS, SLOTS), tl.float32)
    for s in range(slices):
        part = tl.cast(s, tl.int64) * T + row
        square += tl.load(squares + part, mask=is_row, other=0.0)
        first += tl.load(sums + part[:, None] * OUT + n, mask=inside, other=0.0)
        second += tl.load(sums + part[:, None] * OUT + N + n, mask=inside, other=0.0)
        mixed += tl.load(sums + part[:, None, None] * OUT + pair, mask=is_row[:, None, None] & is_pair, other=0.0)
    factor = inverse_rms(square, K, norm_eps)[:, None]
    first = first * factor * tl.load(scale) + tl.load(base + n, mask=n < N, other=0.0)
    second = second * factor * tl.load(scale + 1) + tl.load(base + N + n, mask=n < N, other=0.0)
    mixed = mixed * factor[:, :, None] * tl.load(scale + 2) + tl.load(base + pair, mask=is_pair, other=0.0)
    place = row.to(tl.int64)[:, None] * N + n
    tl.store(pre + place, _sigmoid(first) + eps, mask=inside)
    tl.store(post + place, 2.0 * _sigmoid(second), mask=inside)
    place = row.to(tl.int64)[:, None, None] * (N * N) + pair - 2 * N
    tl.store(comb + place, _sinkhorn(mixed, is_pair, iters, eps, N), mask=is_row[:, None, None] & is_pair)


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    """Of float32, in float64, rounded once."""
    return (1.0 / (1.0 + tl.exp(-x.to(tl.float64)))).to(tl.float32)


@triton.jit
def _sinkhorn(logits: tl.tensor, is_pair: tl.tensor, iters: tl.tensor, eps: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """float32 [T, source, destination]: softmax of rows, then columns and rows in turn, ending on columns."""
    wide = tl.where(is_pair, logits, float("-inf")).to(tl.float64)
    top = tl.max(wide, axis=2, keep_dims=True)
    share = tl.where(is_pair, tl.exp(wide - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    total = tl.sum(share, axis=2, keep_dims=True)
    comb = (share / tl.where(total == 0.0, 1.0, total)).to(tl.float32) + eps
    comb = _divided(comb, 1, eps, N)
    for _ in range(iters - 1):
        comb = _divided(_divided(comb, 2, eps, N), 1, eps, N)
    return comb


@triton.jit
def _divided(comb: tl.tensor, AXIS: tl.constexpr, eps: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """By its sums over an axis, whose terms are added first to last."""
    SLOTS: tl.constexpr = comb.shape[2]
    i = tl.arange(0, SLOTS)
    i = i[None, :, None] if AXIS == 1 else i[None, None, :]
    total = tl.sum(tl.where(i == 0, comb, 0.0), axis=AXIS, keep_dims=True)
    for j in tl.static_range(1, N):
        total += tl.sum(tl.where(i == j, comb, 0.0), axis=AXIS, keep_dims=True)
    return tl.div_rn(comb, tl.broadcast_to(total + eps, comb.shape))


@mhc.mixes.register("triton")
def mixes(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, n, _ = streams.shape
    if n > MOST_STREAMS or streams.dtype != torch.bfloat16 or fn.dtype != torch.float32:
        return mhc.mixes.reference(streams, fn, base, scale, iters, eps)
    outputs, inputs = n * (n + 2), streams[0].numel() if rows else streams.shape[1] * streams.shape[2]
    if fn.shape != (outputs, inputs):
        raise ValueError(f"fn must have shape {[outputs, inputs]}, got {list(fn.shape)}")
    pre, post, comb = (_floats(streams, rows, *rest) for rest in ((n,), (n,), (n, n)))
    if rows == 0:
        return pre, post, comb
    slices, slots = triton.cdiv(inputs, SLICE), triton.next_power_of_2(n)
    sums, squares = _floats(streams, slices, rows, outputs), _floats(streams, slices, rows)
    _slice_sums[(slices, triton.cdiv(rows, 16))](
        streams.contiguous(), fn.contiguous(), sums, squares, rows, inputs, outputs,
        max(16, triton.next_power_of_2(outputs)), 16, 32, SLICE, num_warps=4,
    )  # fmt: skip
    _mixes[(triton.cdiv(rows, 4),)](
        sums, squares, base.float().contiguous(), scale.float().contiguous(), pre, post, comb, rows, inputs, slices,
        iters, float(eps), NORM_EPS, n, slots, 4, num_warps=1, **UNFUSED,
    )  # fmt: skip
    return pre, post, comb


def _floats(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


@triton.jit
def _collapse(
    streams: tl.tensor, weights: tl.tensor, out: tl.tensor, D: tl.tensor, N: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row, d = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(N):
        x = widen(tl.load(streams + (row * N + i) * D + d, mask=d < D, other=0.0))
        term = x * tl.load(weights + row * N + i)
        total = term if i == 0 else total + term
    tl.store(out + row * D + d, narrow(total, tl.bfloat16), mask=d < D)


@mhc.collapse.register("triton")
def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    rows, n, dim = streams.shape
    if n > MOST_STREAMS or streams.dtype != torch.bfloat16 or weights.dtype != torch.float32:
        return mhc.collapse.reference(streams, weights)
    out = torch.empty(rows, dim, dtype=torch.bfloat16, device=streams.device)
    if out.numel():
        _collapse[(triton.cdiv(dim, BLOCK), rows)](
            streams.contiguous(), weights.contiguous(), out, dim, n, BLOCK, **UNFUSED
        )
    return out


@triton.jit
def _expand(
    y: tl.tensor,
    streams: tl.tensor,
    post: tl.tensor,
    comb: tl.tensor,
    out: tl.tensor,
    D: tl.tensor,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, d = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    added = widen(tl.load(y + row * D + d, mask=d < D, other=0.0))
    x: tl.tuple = ()
    for i in tl.static_range(N):
        x = x + (widen(tl.load(streams + (row * N + i) * D + d, mask=d < D, other=0.0)),)  # noqa: RUF005
    for j in tl.static_range(N):
        mixed = tl.load(comb + row * N * N + j) * x[0]
        for i in tl.static_range(1, N):
            mixed += tl.load(comb + (row * N + i) * N + j) * x[i]
        total = tl.load(post + row * N + j) * added + mixed
        tl.store(out + (row * N + j) * D + d, narrow(total, tl.bfloat16), mask=d < D)


@mhc.expand.register("triton")
def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    rows, n, dim = streams.shape
    wide = post.dtype == comb.dtype == torch.float32
    if n > MOST_STREAMS or not wide or not y.dtype == streams.dtype == torch.bfloat16:
        return mhc.expand.reference(y, streams, post, comb)
    out = torch.empty(rows, n, dim, dtype=torch.bfloat16, device=streams.device)
    if out.numel():
        _expand[(triton.cdiv(dim, BLOCK), rows)](
            y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous(), out, dim, n, BLOCK, **UNFUSED
        )
    return out
