"""Router and experts: scores to choice in one kernel; gate, up and activation in one; down; and the sum by expert id.

Chosen pairs (row, expert) are sorted by expert into blocks of rows, or with few pairs each is a block of its own; a
block reads its expert's weights through a table of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ced.formats import E2m1Weight, E4m3Weight
from sglang_ced.kernels import moe
from sglang_ced.kernels.moe import Experts, ExpertWeights
from sglang_ced.kernels.triton.linear import PLAIN, input_tile, matmul, round_input, stored, weight_tile
from sglang_ced.kernels.triton.numbers import UNFUSED, ascending_key, dot, fake_e4m3, narrow, widen

LOWEST = tl.constexpr(-(2**63))
MOST_EXPERTS, MOST_CHOSEN = 1024, 16
FEW_PAIRS = 64  # up to here every pair is a block: sorting would cost more than reading an expert twice

# -- router -----------------------------------------------------------------------------------------------------------


@triton.jit
def _gate(
    logits: tl.tensor,
    bias: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    E: tl.tensor,
    scale: tl.tensor,
    temperature: tl.tensor,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, expert, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, PLACES)
    logit = tl.load(logits + row * E + expert, mask=expert < E, other=0.0)
    score = _score(tl.div_rn(logit, temperature + tl.zeros_like(logit)))
    key = ascending_key(score + tl.load(bias + expert, mask=expert < E, other=0.0)).to(tl.int64)
    # The larger score first, then the lower id: one number for both, and below them all what is no expert.
    key = tl.where(expert < E, (key << 32) | (BLOCK - expert).to(tl.int64), LOWEST)
    ids, values, total = tl.zeros((PLACES,), tl.int64), tl.zeros((PLACES,), tl.float32), 0.0
    for i in tl.static_range(K):
        best = tl.max(key, axis=0)
        value = tl.sum(tl.where(key == best, score, 0.0), axis=0)
        ids = tl.where(place == i, BLOCK - (best & 0xFFFFFFFF), ids)
        values = tl.where(place == i, value, values)
        total = value if i == 0 else total + value
        key = tl.where(key == best, LOWEST, key)
    share = tl.div_rn(values, total + 1e-20 + tl.zeros_like(values)) * scale
    tl.store(chosen + row * K + place, ids, mask=place < K)
    tl.store(weights + row * K + place, share, mask=place < K)


@triton.jit
def _score(logit: tl.tensor) -> tl.tensor:
    """sqrt(softplus(x)) of float32, in float64, rounded once."""
    x = logit.to(tl.float64)
    small = tl.exp(-tl.abs(x))
    above_one = 1.0 + small
    # log(1 + small) without the loss of small's last bits in above_one
    log1p = tl.where(
        above_one == 1.0, small, tl.log(above_one) * small / tl.where(above_one == 1.0, 1.0, above_one - 1.0)
    )
    return tl.sqrt(tl.where(x > 20.0, x, tl.where(x > 0.0, x, 0.0) + log1p)).to(tl.float32)


@moe.route.register("triton")
def route(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    experts = len(weight)
    if not 0 < top_k <= min(MOST_CHOSEN, experts) or experts > MOST_EXPERTS:
        return moe.route.reference(x, weight, bias, top_k, scale, temperature)
    logits = matmul(x, weight)
    chosen = torch.empty(len(x), top_k, dtype=torch.int64, device=x.device)
    weights = torch.empty(len(x), top_k, dtype=torch.float32, device=x.device)
    if len(x):
        _gate[(len(x),)](
            logits, bias.float(), chosen, weights, experts, float(scale), float(temperature), top_k,
            triton.next_power_of_2(top_k), triton.next_power_of_2(experts), num_warps=2, **UNFUSED,
        )  # fmt: skip
    return chosen, weights


# -- experts ----------------------------------------------------------------------------------------------------------


@triton.jit
def _block(plan: tl.tensor, order: tl.tensor, rows: tl.tensor, ROWS: tl.constexpr) -> tuple[tl.tensor, ...]:
    """(expert, first place, pairs [ROWS], which are pairs [ROWS]) of this program's block; no plan: rows in order."""
    i, block = tl.arange(0, ROWS), tl.program_id(1)
    if plan is None:
        expert, first, count = 0, block * ROWS, rows - block * ROWS
        pair = first + i
    else:
        expert = tl.load(plan + 3 * block)
        first, count = tl.load(plan + 3 * block + 1), tl.load(plan + 3 * block + 2)
        pair = tl.load(order + first + i, mask=i < count, other=0)
    return expert, first, pair.to(tl.int64), i < count


@triton.jit
def _weight(
    table: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    expert: tl.tensor,
    PART: tl.constexpr,
    FORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(codes, scales) of one of an expert's weights: from the table of addresses, if there is one."""
    if table is None:
        return codes, scales
    else:
        element: tl.constexpr = tl.bfloat16 if FORM == PLAIN else tl.uint8
        address = table + expert.to(tl.int64) * 6 + 2 * PART
        return (
            tl.multiple_of(tl.load(address).to(tl.pointer_type(element)), 16),
            tl.multiple_of(tl.load(address + 1).to(tl.pointer_type(tl.uint8)), 16),
        )


@triton.jit
def _inner(
    x: tl.tensor,
    table: tl.tensor,
    codes1: tl.tensor,
    scales1: tl.tensor,
    codes3: tl.tensor,
    scales3: tl.tensor,
    plan: tl.tensor,
    order: tl.tensor,
    row_weight: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    D: tl.tensor,
    INNER: tl.tensor,
    limit: tl.tensor,
    CHOSEN: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """x [T, D] through w1 and w3 of each pair's expert -> what w2 takes, by place in the order [P, INNER]."""
    expert, first, pair, is_pair = _block(plan, order, rows, ROWS)
    if tl.sum(is_pair.to(tl.int32)) == 0:
        return
    codes1, scales1 = _weight(table, codes1, scales1, expert, 0, FORM)
    codes3, scales3 = _weight(table, codes3, scales3, expert, 2, FORM)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wide_n, row = n.to(tl.int64), (pair // CHOSEN) * D
    gate, up = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, D, WIDTH):
        a = input_tile(x, row, k, D, is_pair, False, WIDTH)
        gate = dot(a, tl.trans(weight_tile(codes1, scales1, wide_n, k, D, n < INNER, FORM, WIDTH)), gate)
        up = dot(a, tl.trans(weight_tile(codes3, scales3, wide_n, k, D, n < INNER, FORM, WIDTH)), up)
    value = _swiglu(widen(narrow(gate, tl.bfloat16)), widen(narrow(up, tl.bfloat16)), limit)
    if row_weight is not None:
        value = value * tl.load(row_weight + pair, mask=is_pair, other=0.0)[:, None]
    value = narrow(value, tl.bfloat16)
    if FORM != PLAIN:
        blocks = widen(value).reshape(ROWS, COLUMNS // 32, 32)
        value = narrow(fake_e4m3(blocks).reshape(ROWS, COLUMNS), tl.bfloat16)
    place = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None] * INNER + n[None, :]
    tl.store(out + place, value, mask=is_pair[:, None] & (n < INNER)[None, :])


@triton.jit
def _swiglu(gate: tl.tensor, up: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """silu(gate) * up after both are clamped; NaN stays."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up


@triton.jit
def _down(
    x: tl.tensor,
    table: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    plan: tl.tensor,
    order: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    INNER: tl.tensor,
    D: tl.tensor,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """x [P, INNER] by place in the order, through w2 of its expert -> out [P, D] by pair."""
    expert, first, pair, is_pair = _block(plan, order, rows, ROWS)
    if tl.sum(is_pair.to(tl.int32)) == 0:
        return
    codes, scales = _weight(table, codes, scales, expert, 1, FORM)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = (first + tl.arange(0, ROWS)).to(tl.int64) * INNER
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, INNER, WIDTH):
        a = input_tile(x, row, k, INNER, is_pair, False, WIDTH)
        total = dot(a, tl.trans(weight_tile(codes, scales, n.to(tl.int64), k, INNER, n < D, FORM, WIDTH)), total)
    place = pair[:, None] * D + n[None, :]
    tl.store(out + place, narrow(total, tl.bfloat16), mask=is_pair[:, None] & (n < D)[None, :])


@triton.jit
def _combine(
    by_pair: tl.tensor,
    shared: tl.tensor,
    chosen: tl.tensor,
    out: tl.tensor,
    D: tl.tensor,
    K: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Sum of a row's experts by ascending id, the shared one last."""
    row, place = tl.program_id(1).to(tl.int64), tl.arange(0, PLACES)
    ids = tl.load(chosen + row * K + place, mask=place < K, other=1 << 40)
    before = (ids[None, :] < ids[:, None]) | ((ids[None, :] == ids[:, None]) & (place[None, :] < place[:, None]))
    rank = tl.sum(before.to(tl.int32), axis=1)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(K):
        pair = row * K + tl.sum(tl.where(rank == i, place, 0), axis=0)
        total += widen(tl.load(by_pair + pair * D + d, mask=d < D, other=0.0))
    total += widen(tl.load(shared + row * D + d, mask=d < D, other=0.0))
    tl.store(out + row * D + d, narrow(total, tl.bfloat16), mask=d < D)


# -- blocks of pairs --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Blocks:
    """plan int32 [B, 3]: expert, first place, pairs of each block, the last blocks empty; order int64 [P]: pair by
    place. Neither: one expert, blocks of `tile_rows` of the rows."""

    plan: Tensor | None
    order: Tensor | None
    count: int
    tile_rows: int


def _sorted_blocks(chosen: Tensor, experts: int) -> _Blocks:
    """Nothing here waits for the GPU: the number of blocks is a bound, not a count."""
    flat = chosen.flatten()
    pairs = len(flat)
    if pairs <= FEW_PAIRS:
        order = torch.arange(pairs, device=flat.device)
        return _Blocks(torch.stack((flat, order, torch.ones_like(flat)), 1).int(), order, pairs, 16)
    rows = 16 if pairs <= 16 * experts else 32 if pairs <= 64 * experts else 64
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    blocks = (counts + rows - 1) // rows
    ends = blocks.cumsum(0)
    count = pairs // rows + min(experts, pairs)
    block = torch.arange(count, device=flat.device)
    expert = torch.searchsorted(ends, block, right=True).clamp_max(experts - 1)
    within = (block - (ends - blocks)[expert]) * rows
    left = (counts[expert] - within).clamp(0, rows)
    return _Blocks(
        torch.stack((expert, (counts.cumsum(0) - counts)[expert] + within, left), 1).int(), order, count, rows
    )


def _one_expert(rows: int) -> _Blocks:
    tile_rows = 16 if rows <= 16 else 32 if rows <= 64 else 64
    return _Blocks(None, None, triton.cdiv(rows, tile_rows), tile_rows)


def _run(
    x: Tensor,
    example: ExpertWeights,
    table: Tensor | None,
    blocks: _Blocks,
    pairs: int,
    chosen: int,
    row_weight: Tensor | None,
    limit: float,
) -> Tensor:
    """x [T, d], already rounded, through the experts of its pairs -> bfloat16 [pairs, d]."""
    form, parts = stored(example.w1)[2], [part for weight in example for part in stored(weight)[:2]]
    codes1, scales1, codes2, scales2, codes3, scales3 = parts if table is None else [None] * 6
    d, inner = example.w2.shape
    rows = blocks.tile_rows
    columns, width, warps = (32, 128, 4) if rows == 16 else (64, 64, 4 if rows == 32 else 8)
    width_of_two = 64 if rows == 16 else 32  # two tiles of weights at once: wider ones spill
    middle = torch.empty(pairs, inner, dtype=torch.bfloat16, device=x.device)
    _inner[(triton.cdiv(inner, columns), blocks.count)](
        x, table, codes1, scales1, codes3, scales3, blocks.plan, blocks.order, row_weight, middle, pairs, d, inner,
        float(limit), chosen, form, rows, columns, width_of_two, num_warps=warps, num_stages=3,
    )  # fmt: skip
    out = torch.empty(pairs, d, dtype=torch.bfloat16, device=x.device)
    _down[(triton.cdiv(d, columns), blocks.count)](
        middle, table, codes2, scales2, blocks.plan, blocks.order, out, pairs, inner, d, form, rows, columns, width,
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out


def _form(weights: ExpertWeights) -> type | None:
    """The form that all three weights have: stored, or bfloat16 (Tensor); None for any other mixture."""
    for form in (E4m3Weight, E2m1Weight):
        if all(isinstance(weight, form) for weight in weights):
            return form
    plain = all(isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 for weight in weights)
    return Tensor if plain else None


def _addresses(experts: Sequence[ExpertWeights]) -> Tensor:
    """int64 [E, 6]: where the codes and scales of w1, w2 and w3 of every expert are. Kept by `Experts`.

    Raises ValueError where an expert differs from the first in form or shape, or is not contiguous.
    """
    if isinstance(experts, Experts) and isinstance(experts.prepared, Tensor):
        return experts.prepared
    rows, shapes, form = [], [weight.shape for weight in experts[0]], _form(experts[0])
    for index, expert in enumerate(experts):
        parts = [part for weight in expert for part in _parts(weight)]
        if _form(expert) is not form or [weight.shape for weight in expert] != shapes:
            raise ValueError(f"expert {index}: its weights differ from those of expert 0 in form or shape")
        if not all(
            part.is_contiguous() and (part.device.type != "cuda" or part.data_ptr() % 16 == 0) for part in parts
        ):
            raise ValueError(f"expert {index}: its weights must be contiguous and begin at multiples of 16 bytes")
        rows.append([0 if part.is_meta else part.data_ptr() for part in parts])
    table = torch.tensor(rows, dtype=torch.int64, device=parts[0].device)
    if isinstance(experts, Experts):
        experts.prepared = table
    return table


def _parts(weight: object) -> tuple[Tensor, Tensor]:
    """(codes, scales); a plain weight stands for its own scales, which nobody reads."""
    if isinstance(weight, E4m3Weight):
        return weight.codes, weight.scales
    if isinstance(weight, E2m1Weight):
        return weight.packed, weight.scales
    assert isinstance(weight, Tensor)
    return weight, weight


# -- ops --------------------------------------------------------------------------------------------------------------


@moe.expert_mlp.register("triton")
def expert_mlp(x: Tensor, weights: ExpertWeights, limit: float, row_weight: Tensor | None = None) -> Tensor:
    form = _form(weights)
    if form is None or x.dtype != torch.bfloat16 or len(x) == 0:
        return moe.expert_mlp.reference(x, weights, limit, row_weight)
    x = x.contiguous() if form is Tensor else round_input(x)
    row_weight = None if row_weight is None else row_weight.float().contiguous()
    return _run(x, weights, None, _one_expert(len(x)), len(x), 1, row_weight, limit)


@moe.mixture.register("triton")
def mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: Sequence[ExpertWeights],
    shared: ExpertWeights,
    limit: float,
) -> Tensor:
    form, top_k = _form(experts[0]), chosen.shape[1]
    if (
        form is None
        or _form(shared) is None
        or x.dtype != torch.bfloat16
        or not 0 < top_k <= MOST_CHOSEN
        or len(x) == 0
    ):
        return moe.mixture.reference(x, chosen, weights, experts, shared, limit)
    rounded = x.contiguous() if form is Tensor else round_input(x)
    blocks = _sorted_blocks(chosen, len(experts))
    row_weight = weights.float().contiguous()
    by_pair = _run(rounded, experts[0], _addresses(experts), blocks, chosen.numel(), top_k, row_weight, limit)
    of_shared = expert_mlp(x, shared, limit)
    out, block = torch.empty_like(x, memory_format=torch.contiguous_format), 1024
    _combine[(triton.cdiv(x.shape[1], block), len(x))](
        by_pair, of_shared, chosen.contiguous(), out, x.shape[1], top_k, triton.next_power_of_2(top_k), block
    )
    return out
