"""N-gram memory: hash, gather from the table (which may stay in the host's memory), gate and add."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ced.formats import BLOCK
from sglang_ced.kernels import cpu, engram  # noqa: F401, cpu registers the host's versions
from sglang_ced.kernels.triton.norm import inverse_rms
from sglang_ced.kernels.triton.numbers import UNFUSED, e4m3_value, narrow, ue8m0_value, widen

ROWS = 16  # tokens hashed by a program

# -- hash -------------------------------------------------------------------------------------------------------------


@triton.jit
def _ngram_rows(
    classes: tl.tensor,
    constants: tl.tensor,
    out: tl.tensor,
    T: tl.tensor,
    pad_class: tl.tensor,
    NGRAM: tl.constexpr,
    HEADS: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """constants int64: NGRAM multipliers, then (NGRAM - 1) * HEADS primes, then as many offsets."""
    WIDTH: tl.constexpr = (NGRAM - 1) * HEADS
    row, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SLOTS)
    mixed, blocked = tl.zeros((ROWS,), tl.int64), tl.zeros((ROWS,), tl.int1)
    inside = (row < T)[:, None] & (head < HEADS)[None, :]
    for back in tl.static_range(NGRAM):
        value = tl.load(classes + row.to(tl.int64) * NGRAM + back, mask=row < T, other=0)
        blocked = blocked | (value < 0)
        mixed = mixed ^ (tl.where(blocked, pad_class, value) * tl.load(constants + back))
        if back > 0:
            place = NGRAM + (back - 1) * HEADS + head
            prime = tl.load(constants + place, mask=head < HEADS, other=1)[None, :]
            offset = tl.load(constants + WIDTH + place, mask=head < HEADS, other=0)[None, :]
            rest = mixed[:, None] % prime
            rest = tl.where(rest < 0, rest + prime, rest)
            target = out + row.to(tl.int64)[:, None] * WIDTH + (back - 1) * HEADS + head[None, :]
            tl.store(target, rest + offset, mask=inside)


@lru_cache(maxsize=64)
def _constants(
    multipliers: tuple[int, ...], primes: tuple[tuple[int, ...], ...], offsets: tuple[int, ...], device: torch.device
) -> Tensor:
    flat = (*multipliers, *(prime for row in primes for prime in row), *offsets)
    return torch.tensor(flat, dtype=torch.int64, device=device)


@engram.ngram_rows.register("triton")
def ngram_rows(
    classes: Tensor, pad_class: int, multipliers: Sequence[int], primes: Sequence[Sequence[int]], offsets: Sequence[int]
) -> Tensor:
    rows, ngram = classes.shape
    heads = len(primes[0]) if primes else 0
    if ngram < 2 or len(primes) != ngram - 1 or any(len(row) != heads for row in primes):
        return engram.ngram_rows.reference(classes, pad_class, multipliers, primes, offsets)
    out = torch.empty(rows, (ngram - 1) * heads, dtype=torch.int64, device=classes.device)
    if out.numel():
        constants = _constants(tuple(multipliers), tuple(map(tuple, primes)), tuple(offsets), classes.device)
        _ngram_rows[(triton.cdiv(rows, ROWS),)](
            classes.contiguous(), constants, out, rows, pad_class, ngram, heads,
            triton.next_power_of_2(heads), ROWS, num_warps=1,
        )  # fmt: skip
    return out


# -- look-up ----------------------------------------------------------------------------------------------------------


@triton.jit
def _look_up(
    codes: tl.tensor, scales: tl.tensor, rows: tl.tensor, out: tl.tensor, BLOCKS: tl.constexpr, SLOTS: tl.constexpr
) -> None:
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i)
    block, column = tl.arange(0, SLOTS)[:, None], tl.arange(0, 32)[None, :]
    place, inside = block * 32 + column, (block < BLOCKS) & (column < 32)
    value = e4m3_value(tl.load(codes + row * (32 * BLOCKS) + place, mask=inside, other=0))
    scale = ue8m0_value(tl.load(scales + row * BLOCKS + block, mask=block < BLOCKS, other=0))
    tl.store(out + i * (32 * BLOCKS) + place, narrow(value * scale, tl.bfloat16), mask=inside)


@engram.look_up.register("triton")
def look_up(codes: Tensor, scales: Tensor, rows: Tensor, serial: bool = False) -> Tensor:
    shape, dim = rows.shape, codes.shape[1]
    if serial:  # by a thread of the host, over memory of the host
        return engram.look_up.fast.get("cpu", engram.look_up.reference)(codes, scales, rows, serial)
    if dim % BLOCK:
        return engram.look_up.reference(codes, scales, rows, serial)
    if codes.device != rows.device:
        wanted = rows.flatten().to(codes.device)
        codes, scales = codes[wanted].to(rows.device), scales[wanted].to(rows.device)
        rows = torch.arange(rows.numel(), device=rows.device)
    out = torch.empty(shape[0], shape[1] * dim, dtype=torch.bfloat16, device=rows.device)
    if out.numel():
        blocks = dim // BLOCK
        _look_up[(rows.numel(),)](
            codes.contiguous(), scales.contiguous(), rows.contiguous(), out, blocks,
            triton.next_power_of_2(blocks), num_warps=1,
        )  # fmt: skip
    return out


@engram.read_rows.register("triton")
def read_rows(fd: int, offset: int, rows: Tensor, out: Tensor) -> tuple[int, int]:
    """The host reads files, whatever computes."""
    return engram.read_rows.fast.get("cpu", engram.read_rows.reference)(fd, offset, rows, out)


# -- gate -------------------------------------------------------------------------------------------------------------


@triton.jit
def _fuse(
    streams: tl.tensor,
    keys_value: tl.tensor,
    qk_weight: tl.tensor,
    alive: tl.tensor,
    out: tl.tensor,
    D: tl.tensor,
    eps: tl.tensor,
    share: tl.tensor,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One stream of a row: its gate in a first pass, the sum in a second."""
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    x_row, key_row = streams + (row * N + stream) * D, keys_value + (row * (N + 1) + stream) * D
    dots, squares, key_squares = (
        tl.zeros((BLOCK,), tl.float32),
        tl.zeros((BLOCK,), tl.float32),
        tl.zeros((BLOCK,), tl.float32),
    )
    for start in range(0, D, BLOCK):
        d = start + i
        x = widen(tl.load(x_row + d, mask=d < D, other=0.0))
        key = widen(tl.load(key_row + d, mask=d < D, other=0.0))
        dots += x * tl.load(qk_weight + stream * D + d, mask=d < D, other=0.0) * key
        squares += x * x
        key_squares += key * key
    dot = tl.sum(dots, axis=0, keep_dims=True) * inverse_rms(tl.sum(squares, axis=0, keep_dims=True), D, eps)
    dot = dot * inverse_rms(tl.sum(key_squares, axis=0, keep_dims=True), D, eps) * share
    size = tl.abs(dot)
    root = tl.sqrt_rn(tl.where(size < 1e-6, 1e-6, size)).to(tl.float64)
    signed = tl.where(dot > 0, root, tl.where(dot < 0, -root, tl.where(dot == 0, 0.0, root)))
    gate = (1.0 / (1.0 + tl.exp(-signed))).to(tl.float32)
    if alive is not None:
        gate = gate * tl.load(alive + row).to(tl.float32)
    value_row = keys_value + (row * (N + 1) + N) * D
    for start in range(0, D, BLOCK):
        d = start + i
        x = widen(tl.load(x_row + d, mask=d < D, other=0.0))
        value = widen(tl.load(value_row + d, mask=d < D, other=0.0))
        tl.store(out + (row * N + stream) * D + d, narrow(x + gate * value, tl.bfloat16), mask=d < D)


@engram.fuse.register("triton")
def fuse(streams: Tensor, keys_value: Tensor, qk_weight: Tensor, eps: float, alive: Tensor | None = None) -> Tensor:
    rows, n, dim = streams.shape
    if not streams.dtype == keys_value.dtype == torch.bfloat16 or qk_weight.dtype != torch.float32:
        return engram.fuse.reference(streams, keys_value, qk_weight, eps, alive)
    if keys_value.shape != (rows, (n + 1) * dim):
        raise ValueError(f"keys_value must have shape {[rows, (n + 1) * dim]}, got {list(keys_value.shape)}")
    out = torch.empty_like(streams, memory_format=torch.contiguous_format)
    if out.numel():
        _fuse[(rows, n)](
            streams.contiguous(), keys_value.contiguous(), qk_weight.contiguous(), alive, out, dim, float(eps),
            dim**-0.5, n, min(1024, triton.next_power_of_2(dim)), num_warps=4, **UNFUSED,
        )  # fmt: skip
    return out
