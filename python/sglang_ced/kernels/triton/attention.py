"""Attention in one pass: window rows and packed groups of a key list, decoded in registers, the sink in the
denominator."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ced.formats import KV_BLOCK, record_of
from sglang_ced.kernels import attention
from sglang_ced.kernels.attention import SOFTMAX_BLOCK
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
        tiles, new_top = (), top
        for i in tl.static_range(TILES):
            key = _key_list(keys, row, start + i * TILE, N, TILE)
            k_even, k_odd = _key_rows(window, pool, key, M, D, HALF)
            # Read again by every tile, at an address the compiler cannot foresee: kept in registers, q would take half.
            again = q + place + (start + i) * zero
            scores = _scores(
                tl.load(again, mask=inside, other=0.0),
                tl.load(again + 1, mask=inside, other=0.0),
                k_even,
                k_odd,
                key,
                scale,
            )
            new_top = _largest(new_top, tl.max(scores, axis=1))
            tiles = tiles + ((k_even, k_odd, scores),)  # noqa: RUF005, Triton has no starred tuples
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade = tl.exp(top - base)
        total, even, odd = total * fade, even * fade[:, None], odd * fade[:, None]
        for i in tl.static_range(TILES):
            k_even, k_odd, scores = tiles[i]
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
def _scores(
    q_even: tl.tensor, q_odd: tl.tensor, even: tl.tensor, odd: tl.tensor, key: tl.tensor, scale: tl.tensor
) -> tl.tensor:
    """float32 [HEADS, BLOCK]; -inf where there is no key."""
    nothing = tl.zeros((q_even.shape[0], key.shape[0]), tl.float32)
    scores = dot(q_odd, tl.trans(odd), dot(q_even, tl.trans(even), nothing)) * scale
    return tl.where((key < 0)[None, :], float("-inf"), scores)


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
    words = _words(window, key, (key >= 0) & (key < M), D, HALF)
    if pool is not None and pool.dtype.element_ty == tl.int32:
        words |= _words(pool, key - M, key >= M, D, HALF)
    even = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    odd = ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    if pool is not None and pool.dtype.element_ty == tl.uint8:
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
def _words(rows: tl.tensor, row: tl.tensor, is_row: tl.tensor, D: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    """int32 [N, HALF]: two neighbouring bfloat16 channels each; zeros where there is no row."""
    pair = tl.arange(0, HALF)
    return tl.load(rows + row[:, None] * (D // 2) + pair[None, :], mask=is_row[:, None] & (2 * pair < D), other=0)


@triton.jit
def _scaled(value: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """float32 [N, HALF] times the scale [N, HALF / 8] of its eight bytes -> bfloat16, exactly."""
    ROWS: tl.constexpr = value.shape[0]
    BLOCKS: tl.constexpr = scale.shape[1]
    scaled = value.reshape(ROWS, BLOCKS, 8) * scale[:, :, None]
    return narrow(scaled.reshape(ROWS, 8 * BLOCKS), tl.bfloat16)


@attention.attend.register("triton")
def attend(q: Tensor, window: Tensor, pool: Tensor | None, keys: Tensor, sink: Tensor) -> Tensor:
    rows, heads, dim = q.shape
    if dim % KV_BLOCK or q.dtype != torch.bfloat16:
        return attention.attend.reference(q, window, pool, keys, sink)
    if pool is not None:
        packed = record_of(pool, dim, "global").scale_bytes > 0
        pool = pool.contiguous() if packed else pool.contiguous().view(torch.int32)
    q, out = q.contiguous(), torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.numel() == 0:
        return out
    half = max(16, triton.next_power_of_2(dim) // 2)
    _attend[(triton.cdiv(heads, HEADS), rows)](
        q, window.contiguous().view(torch.int32), pool, keys.contiguous(), sink.float().contiguous(), out,
        heads, len(window), keys.shape[1], dim**-0.5, 0, dim, half, HEADS, SOFTMAX_BLOCK // TILE, TILE,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return out
