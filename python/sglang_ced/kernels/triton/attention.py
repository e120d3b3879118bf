"""Attention in one pass: window rows and packed groups of a key list, decoded in registers, the sink in the
denominator."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ced.formats import KV_BLOCK, record_of
from sglang_ced.kernels import attention
from sglang_ced.kernels.attention import ROWS_AT_ONCE, SOFTMAX_BLOCK
from sglang_ced.kernels.triton.numbers import dot, e2m1_value, e4m3_value, narrow

HEADS = 16  # of a program, all with the same keys
TILE = 16  # keys that are decoded at once


@triton.jit
def _attend(
    q: tl.tensor,
    window: tl.tensor,
    pool: tl.tensor,
    keys: tl.tensor,
    sink: tl.tensor,
    out: tl.tensor,
    H: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A row and some of its heads over all its keys.

    Even and odd channels are two tiles from load to store: so a byte of two codes and a word of two bfloat16 come apart
    without any exchange between threads.
    """
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    pair, is_head = tl.arange(0, HALF), head < H
    place = (row * H + head)[:, None] * D + 2 * pair[None, :]
    inside = is_head[:, None] & (2 * pair < D)[None, :]
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    even, odd = tl.zeros((HEADS, HALF), tl.float32), tl.zeros((HEADS, HALF), tl.float32)
    for start in range(0, N, TILES * TILE):
        new_top = top
        tiles: tl.tuple = ()
        for i in tl.static_range(TILES):
            key = _key_list(keys, row, start + i * TILE, N, TILE)
            k_even, k_odd = _key_rows(window, pool, key, M, D, HALF)
            # Read again by every tile, at an address the compiler cannot foresee: kept in registers, q would take half.
            again = q + place + (start + i) * zero
            scores = dot(tl.load(again, mask=inside, other=0.0), tl.trans(k_even), tl.zeros((HEADS, TILE), tl.float32))
            again += zero
            scores = dot(tl.load(again + 1, mask=inside, other=0.0), tl.trans(k_odd), scores) * scale
            scores = tl.where((key < 0)[None, :], float("-inf"), scores)
            new_top = _largest(new_top, tl.max(scores, axis=1))
            tiles = tiles + ((key, k_even, k_odd, scores),)  # noqa: RUF005, Triton has no starred tuples
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp(top - base)
        total, even, odd = total * fade, even * fade[:, None], odd * fade[:, None]
        for i in tl.static_range(TILES):
            key, k_even, k_odd, scores = tiles[i]
            if pool is None:  # nothing to decode: read again, rather than kept
                k_even, k_odd = _key_rows(window, pool, key + (start + i) * zero, M, D, HALF)
            p = tl.exp(scores - base[:, None])
            total += tl.sum(p, axis=1)
            rounded = narrow(p, tl.bfloat16)
            even, odd = dot(rounded, k_even, even), dot(rounded, k_odd, odd)
        top = new_top
    base = tl.where(top == float("-inf"), 0.0, top)
    total += tl.exp(tl.load(sink + head, mask=is_head, other=0.0) - base)
    tl.store(out + place, narrow(tl.div_rn(even, _like(total[:, None], even)), tl.bfloat16), mask=inside)
    tl.store(out + place + 1, narrow(tl.div_rn(odd, _like(total[:, None], odd)), tl.bfloat16), mask=inside)


@triton.jit
def _key_list(keys: tl.tensor, row: tl.tensor, start: tl.tensor, N: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    entry = start + tl.arange(0, BLOCK)
    return tl.load(keys + row * N + entry, mask=entry < N, other=-1)


@triton.jit
def _largest(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b, tl.PropagateNan.ALL)


@triton.jit
def _like(x: tl.tensor, shape_of: tl.tensor) -> tl.tensor:
    return tl.broadcast_to(x, shape_of.shape)


@triton.jit
def _key_rows(
    window: tl.tensor, pool: tl.tensor, key: tl.tensor, M: tl.tensor, D: tl.constexpr, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Even and odd channels bfloat16 [N, HALF] of the rows that `key` names; zeros where it names none."""
    pair = tl.arange(0, HALF)
    is_channel = 2 * pair < D
    from_window = (key >= 0) & (key < M)
    words = tl.load(window + key[:, None] * (D // 2) + pair[None, :], mask=from_window[:, None] & is_channel, other=0)
    even = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    odd = ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    if pool is not None:
        from_pool = key >= M
        record = pool + (key - M)[:, None] * (D // 2 + D // 16)
        codes = tl.load(record + pair[None, :], mask=from_pool[:, None] & is_channel, other=0)
        block = tl.arange(0, HALF // 8)
        scales = tl.load(record + D // 2 + block[None, :], mask=from_pool[:, None] & (16 * block < D), other=0)
        scale = e4m3_value(scales)
        even = tl.where(from_pool[:, None], _scaled(e2m1_value(codes), scale), even)
        odd = tl.where(from_pool[:, None], _scaled(e2m1_value(codes >> 4), scale), odd)
    return even, odd


@triton.jit
def _scaled(value: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """float32 [N, HALF] times the scale [N, HALF / 8] of its eight bytes -> bfloat16, exactly."""
    ROWS: tl.constexpr = value.shape[0]
    BLOCKS: tl.constexpr = scale.shape[1]
    scaled = value.reshape(ROWS, BLOCKS, 8) * scale[:, :, None]
    return narrow(scaled.reshape(ROWS, 8 * BLOCKS), tl.bfloat16)


@attention.attend.register("triton")
def attend(q: Tensor, window: Tensor, pool: Tensor | None, keys: Tensor, sink: Tensor) -> Tensor:
    rows, _, dim = q.shape
    if dim % KV_BLOCK or q.dtype != torch.bfloat16:
        return attention.attend.reference(q, window, pool, keys, sink)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    if pool is None or record_of(pool, dim, "global").scale_bytes:
        _run(q, window, pool, keys, sink, out)
        return out
    for start in range(0, rows, ROWS_AT_ONCE):
        some = slice(start, start + ROWS_AT_ONCE)
        _run(q[some], *_gathered(window, pool, keys[some]), sink, out[some])
    return out


def _gathered(window: Tensor, pool: Tensor, keys: Tensor) -> tuple[Tensor, None, Tensor]:
    """The groups that rows attend to, copied behind the window rows: for pools of bfloat16."""
    groups = pool[(keys - len(window)).clamp_min(0)].view(torch.bfloat16).flatten(0, 1)
    place = torch.arange(keys.numel(), device=keys.device).view(keys.shape) + len(window)
    return torch.cat((window, groups)), None, torch.where(keys < len(window), keys, place)


def _run(q: Tensor, window: Tensor, pool: Tensor | None, keys: Tensor, sink: Tensor, out: Tensor) -> None:
    rows, heads, dim = q.shape
    half = max(16, triton.next_power_of_2(dim) // 2)
    _attend[(triton.cdiv(heads, HEADS), rows)](
        q.contiguous(), window.contiguous().view(torch.int32), None if pool is None else pool.contiguous(),
        keys.contiguous(), sink.float().contiguous(), out,
        heads, len(window), keys.shape[1], dim**-0.5, 0, dim, half, HEADS, SOFTMAX_BLOCK // TILE, TILE,
        num_warps=8, num_stages=1,
    )  # fmt: skip
