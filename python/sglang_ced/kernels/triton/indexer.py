"""Index scores over packed keys, and selection: a radix select on the 65536 values that a bfloat16 score can have."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ced.formats import BLOCK, record_of
from sglang_ced.kernels import indexer
from sglang_ced.kernels.triton.numbers import dot, e2m1_value, narrow, ue8m0_value, widen

KEYS = 64  # of a program
ROWS = 8  # of a program, which decodes its keys once for all of them

# -- scores -----------------------------------------------------------------------------------------------------------


@triton.jit
def _index_scores(
    q: tl.tensor,
    weights: tl.tensor,
    keys: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    T: tl.tensor,
    H: tl.tensor,
    G: tl.tensor,
    slots_stride: tl.tensor,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    g, pair, head = tl.program_id(0) * KEYS + tl.arange(0, KEYS), tl.arange(0, HALF), tl.arange(0, HEADS)
    first = tl.program_id(1) * ROWS
    slot = g.to(tl.int64)
    if slots is not None:  # one list for all rows, or one row to a program
        slot = tl.load(slots + first.to(tl.int64) * slots_stride + g, mask=g < G, other=-1)
    even, odd = _keys(keys, slot, (g < G) & (slot >= 0), D, HALF)
    even, odd = tl.trans(even), tl.trans(odd)
    for row in range(first, tl.minimum(first + ROWS, T)):
        wide_row = tl.cast(row, tl.int64)
        place = (wide_row * H + head)[:, None] * D + 2 * pair[None, :]
        inside = (head < H)[:, None] & (2 * pair < D)[None, :]
        dots = dot(tl.load(q + place, mask=inside, other=0.0), even, tl.zeros((HEADS, KEYS), tl.float32))
        dots = widen(narrow(dot(tl.load(q + place + 1, mask=inside, other=0.0), odd, dots), tl.bfloat16))
        weight = widen(tl.load(weights + wide_row * H + head, mask=head < H, other=0.0))
        weighted = narrow(tl.where(dots < 0.0, 0.0, dots) * weight[:, None], tl.bfloat16)
        score = tl.where(slot < 0, float("-inf"), tl.sum(widen(weighted), axis=0))
        tl.store(out + wide_row * G + g, narrow(score, tl.bfloat16), mask=g < G)


@triton.jit
def _keys(
    keys: tl.tensor, g: tl.tensor, is_key: tl.tensor, D: tl.constexpr, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Even and odd channels bfloat16 [N, HALF] of packed records, or of words of two bfloat16."""
    pair = tl.arange(0, HALF)
    inside = is_key[:, None] & (2 * pair < D)[None, :]
    if keys.dtype.element_ty == tl.int32:
        words = tl.load(keys + g[:, None] * (D // 2) + pair[None, :], mask=inside, other=0)
        even = (words & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        odd = ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        record, block = keys + g[:, None] * (D // 2 + D // 32), tl.arange(0, HALF // 16)
        codes = tl.load(record + pair[None, :], mask=inside, other=0)
        scale = ue8m0_value(tl.load(record + D // 2 + block, mask=is_key[:, None] & (32 * block < D), other=0))
        even, odd = _scaled(e2m1_value(codes), scale), _scaled(e2m1_value(codes >> 4), scale)
    return even, odd


@triton.jit
def _scaled(value: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """float32 [N, HALF] times the scale [N, HALF / 16] of its sixteen bytes -> bfloat16, exactly."""
    KEYS: tl.constexpr = value.shape[0]
    BLOCKS: tl.constexpr = scale.shape[1]
    return narrow((value.reshape(KEYS, BLOCKS, 16) * scale[:, :, None]).reshape(KEYS, 16 * BLOCKS), tl.bfloat16)


def _takes(q: Tensor, weights: Tensor) -> bool:
    return q.shape[-1] % BLOCK == 0 and q.dtype == weights.dtype == torch.bfloat16


def _run(q: Tensor, weights: Tensor, keys: Tensor, slots: Tensor | None) -> Tensor:
    rows, heads, dim = q.shape
    groups = len(keys) if slots is None else slots.shape[-1]
    packed = record_of(keys, dim, "index").scale_bytes > 0
    keys = keys.contiguous() if packed else keys.contiguous().view(torch.int32)
    out = torch.empty(rows, groups, dtype=torch.bfloat16, device=q.device)
    if out.numel():
        own = slots is not None and slots.dim() == 2
        tile_rows = 1 if own or rows <= ROWS else ROWS
        _index_scores[(triton.cdiv(groups, KEYS), triton.cdiv(rows, tile_rows))](
            q.contiguous(), weights.contiguous(), keys, None if slots is None else slots.contiguous(), out,
            rows, heads, groups, groups if own else 0, dim, triton.next_power_of_2(dim) // 2,
            max(16, triton.next_power_of_2(heads)), tile_rows, KEYS, num_warps=4,
        )  # fmt: skip
    return out


@indexer.index_scores.register("triton")
def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    return _run(q, weights, keys, None) if _takes(q, weights) else indexer.index_scores.reference(q, weights, keys)


@indexer.index_scores_at.register("triton")
def index_scores_at(q: Tensor, weights: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
    if not _takes(q, weights):
        return indexer.index_scores_at.reference(q, weights, pool, slots)
    if slots.dim() not in (1, 2) or slots.shape[:-1] not in ((), (len(q),)):
        raise ValueError(f"slots must be [G] or [{len(q)}, G], got shape {list(slots.shape)}")
    return _run(q, weights, pool, slots)


# -- selection --------------------------------------------------------------------------------------------------------


@triton.jit
def _order(scores: tl.tensor, place: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Scores as int32 in their order, 0 for what is hidden: minus infinity, NaN and what lies outside."""
    bits = tl.load(scores + place, mask=inside, other=float("-inf")).to(tl.uint16, bitcast=True).to(tl.int32)
    size = bits & 0x7FFF
    key = tl.where((bits >= 0x8000) & (size > 0), 0x7FFF - size, 0x8000 + size)
    return tl.where((size > 0x7F80) | (bits == 0xFF80), 0, key)


@triton.jit
def _cut(histogram: tl.tensor, want: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(highest bin from which on there are `want` values, how many lie above it), for want >= 1."""
    bin = tl.arange(0, 256)
    from_here = tl.cumsum(histogram, 0, reverse=True)
    cut = tl.max(tl.where(from_here >= want, bin, -1), axis=0)
    return cut, tl.sum(tl.where(bin > cut, histogram, 0), axis=0)


@triton.jit
def _select(
    scores: tl.tensor,
    out: tl.tensor,
    G: tl.tensor,
    K: tl.tensor,
    groups: tl.tensor,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """The K best of a row of G. SPAN 0: their places into out [T, K]; else whether each of them is one, into bool
    out [T, groups], SPAN times over."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    high, low = tl.zeros((256,), tl.int32), tl.zeros((256,), tl.int32)
    for start in range(0, G, BLOCK):
        key = _order(scores, row * G + start + i, start + i < G)
        high += tl.histogram(key >> 8, 256, mask=key > 0)
    want = tl.minimum(K, tl.sum(high, axis=0))
    cut_high, above = _cut(high, want)
    for start in range(0, G, BLOCK):
        key = _order(scores, row * G + start + i, start + i < G)
        low += tl.histogram(key & 255, 256, mask=(key > 0) & ((key >> 8) == cut_high))
    cut_low, above_low = _cut(low, want - above)
    cut = tl.where(want > 0, cut_high * 256 + cut_low, 1 << 16)
    ties_left, found = want - above - above_low, tl.zeros((), tl.int32)  # ties at the cut go to the lower places
    for start in range(0, G, BLOCK):
        g = start + i
        key = _order(scores, row * G + g, g < G)
        tie = (key == cut).to(tl.int32)
        chosen = ((key > cut) | ((tie > 0) & (tl.cumsum(tie, 0) <= ties_left))).to(tl.int32)
        if SPAN == 0:
            tl.store(out + row * K + found + tl.cumsum(chosen, 0) - 1, g.to(tl.int64), mask=chosen > 0)
        else:
            for j in range(SPAN):
                tl.store(out + row * groups + g * SPAN + j, chosen > 0, mask=(g < G) & (g * SPAN + j < groups))
        ties_left -= tl.sum(tie, axis=0)
        found += tl.sum(chosen, axis=0)


def _width(groups: int) -> int:
    return 256 if groups <= 256 else 1024


@indexer.top_groups.register("triton")
def top_groups(scores: Tensor, k: int) -> Tensor:
    if scores.dtype != torch.bfloat16 or scores.dim() != 2:
        return indexer.top_groups.reference(scores, k)
    if k < 0:
        raise ValueError(f"k must not be negative, got {k}")
    rows, groups = scores.shape
    k = min(k, groups)
    out = torch.full((rows, k), -1, dtype=torch.int64, device=scores.device)
    if out.numel():
        _select[(rows,)](scores.contiguous(), out, groups, k, groups, _width(groups), 0, num_warps=4)
    return out


@triton.jit
def _best_of_blocks(
    scores: tl.tensor,
    visible: tl.tensor,
    best: tl.tensor,
    G: tl.tensor,
    B: tl.tensor,
    SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Best score of each block; NaN hides its block; the newest visible block counts as infinite."""
    row = tl.program_id(1).to(tl.int64)
    block, j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    g = block[:, None] * SIZE + j[None, :]
    value = widen(tl.load(scores + row * G + g, mask=(j < SIZE)[None, :] & (g < G), other=float("-inf")))
    has_nan = tl.max((value != value).to(tl.int32), axis=1) > 0
    top = tl.where(has_nan, float("-inf"), tl.max(tl.where(value == value, value, float("-inf")), axis=1))
    seen = tl.load(visible + row)
    top = tl.where((seen > 0) & (block == (seen - 1) // SIZE), float("inf"), top)
    tl.store(best + row * B + block, narrow(top, tl.bfloat16), mask=block < B)


@indexer.candidate_groups.register("triton")
def candidate_groups(scores: Tensor, visible: Tensor, blocks: int, block_size: int) -> Tensor:
    if scores.dtype != torch.bfloat16:
        return indexer.candidate_groups.reference(scores, visible, blocks, block_size)
    rows, groups = scores.shape
    out = torch.zeros(rows, groups, dtype=torch.bool, device=scores.device)
    if out.numel() == 0 or blocks <= 0:
        return out
    count = triton.cdiv(groups, block_size)
    best = torch.empty(rows, count, dtype=torch.bfloat16, device=scores.device)
    _best_of_blocks[(triton.cdiv(count, 128), rows)](
        scores.contiguous(), visible.contiguous(), best, groups, count, block_size,
        triton.next_power_of_2(block_size), 128, num_warps=4,
    )  # fmt: skip
    _select[(rows,)](best, out, count, min(blocks, count), groups, _width(count), block_size, num_warps=4)
    return out
