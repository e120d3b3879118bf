"""Calls of every op at the sizes of the released model, with tensors that have no memory: what `compile` compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from sglang_ced.formats import BLOCK, E2m1Weight, E4m3Weight, Record, RecordKind, Weight
from sglang_ced.kernels.moe import Experts, ExpertWeights
from sglang_ced.kernels.triton import (
    attention,
    compressor,
    engram,
    indexer,
    linear,
    mhc,
    moe,
    norm,
    records,
    rope,
)

# DeepSeek-V4.1-Flash (docs/explanation/architecture.md).
HIDDEN, HEADS, HEAD_DIM, ROPE_DIM, INNER, EXPERTS, TOP_K = 5120, 64, 512, 64, 2304, 384, 6
STREAMS, INDEX_HEADS, INDEX_DIM, GROUPS = 4, 32, 128, 8
WINDOW, SELECTED, CONTEXT = 128, 512, 1 << 20
FEW, MANY = 1, 2048


def floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def wide(*shape: int) -> Tensor:
    return floats(*shape, dtype=torch.float32)


def ints(*shape: int) -> Tensor:
    return floats(*shape, dtype=torch.int64)


def octets(*shape: int) -> Tensor:
    return floats(*shape, dtype=torch.uint8)


def weight(form: str, n: int, k: int) -> Weight:
    if form == "e4m3":
        return E4m3Weight(octets(n, k), octets(-(-n // BLOCK), -(-k // BLOCK)))
    return E2m1Weight(octets(n, k // 2), octets(n, k // BLOCK)) if form == "e2m1" else floats(n, k)


Case = tuple[str, Callable[..., object], tuple[object, ...]]


def _linear() -> Iterator[Case]:
    yield "linear.round_input", linear.round_input, (floats(MANY, HIDDEN),)
    for rows in (FEW, 64, MANY):
        for form in ("e4m3", "e2m1", "bfloat16"):
            yield (
                f"linear.linear, {form}, {rows} rows",
                linear.linear_,
                (floats(rows, HIDDEN), weight(form, 512, HIDDEN)),
            )
        x = floats(rows, HEADS * HEAD_DIM)
        yield f"linear.grouped_linear, {rows} rows", linear.grouped_linear, (x, weight("e4m3", 8192, 4096), GROUPS)
        yield f"linear.matmul, float32, {rows} rows", linear.matmul, (wide(rows, HIDDEN), wide(512, HIDDEN))


def expert(form: str) -> ExpertWeights:
    return ExpertWeights(weight(form, INNER, HIDDEN), weight(form, HIDDEN, INNER), weight(form, INNER, HIDDEN))


def _moe() -> Iterator[Case]:
    yield "moe.route", moe.route, (floats(MANY, HIDDEN), floats(EXPERTS, HIDDEN), wide(EXPERTS), TOP_K, 2.5)
    for rows in (FEW, 64, MANY):
        yield f"moe.expert_mlp, {rows} rows", moe.expert_mlp, (floats(rows, HIDDEN), expert("e4m3"), 10.0)
        for form in ("e2m1", "e4m3", "bfloat16"):
            experts = Experts([expert(form)] * EXPERTS)
            args = (floats(rows, HIDDEN), ints(rows, TOP_K), wide(rows, TOP_K), experts, experts[0], 10.0)
            yield f"moe.mixture, {form}, {rows} rows", moe.mixture, args


def _attention() -> Iterator[Case]:
    pool = octets(CONTEXT, Record(HEAD_DIM, "global").nbytes)
    q, window, sink = floats(MANY, HEADS, HEAD_DIM), floats(MANY + WINDOW, HEAD_DIM), wide(HEADS)
    yield "attention.attend", attention.attend, (q, window, pool, ints(MANY, WINDOW + SELECTED), sink)
    wide_pool = octets(CONTEXT, Record(HEAD_DIM, "global_bf16").nbytes)
    yield "attention.attend, bfloat16", attention.attend, (q, window, wide_pool, ints(MANY, WINDOW + SELECTED), sink)
    yield "attention.attend, window alone", attention.attend, (q, window, None, ints(MANY, WINDOW), sink)


def _indexer() -> Iterator[Case]:
    keys = octets(CONTEXT, Record(INDEX_DIM, "index").nbytes)
    for rows in (FEW, 64):
        q, weights = floats(rows, INDEX_HEADS, INDEX_DIM), floats(rows, INDEX_HEADS)
        yield f"indexer.index_scores, {rows} rows", indexer.index_scores, (q, weights, keys)
        yield f"indexer.index_scores_at, {rows} rows", indexer.index_scores_at, (q, weights, keys, ints(CONTEXT))
        yield "indexer.index_scores_at, own lists", indexer.index_scores_at, (q, weights, keys, ints(rows, 16384))
    wide_keys = octets(CONTEXT, Record(INDEX_DIM, "index_bf16").nbytes)
    yield "indexer.index_scores, bfloat16", indexer.index_scores, (q, weights, wide_keys)
    yield "indexer.top_groups", indexer.top_groups, (floats(64, CONTEXT), SELECTED)
    yield "indexer.candidate_groups", indexer.candidate_groups, (floats(64, CONTEXT), ints(64), 2048, 8)


def _rows() -> Iterator[Case]:
    x, streams, y = floats(MANY, HEADS, HEAD_DIM), floats(MANY, STREAMS, HIDDEN), floats(MANY, HIDDEN)
    yield "norm.rms_norm", norm.rms_norm, (y, floats(HIDDEN), 1e-20)
    yield "rope.rotate", rope.rotate, (x, wide(MANY, ROPE_DIM // 2), wide(MANY, ROPE_DIM // 2))
    mixes = STREAMS * (STREAMS + 2)
    yield "mhc.mixes", mhc.mixes, (streams, wide(mixes, STREAMS * HIDDEN), wide(mixes), wide(3), 20, 1e-6)
    yield "mhc.collapse", mhc.collapse, (streams, wide(MANY, STREAMS))
    yield "mhc.expand", mhc.expand, (y, streams, wide(MANY, STREAMS), wide(MANY, STREAMS, STREAMS))
    yield "engram.ngram_rows", engram.ngram_rows, (ints(MANY, 3), 1, (1, 3, 5), ((7,) * 8, (11,) * 8), (0,) * 16)
    yield "engram.look_up", engram.look_up, (octets(CONTEXT, 256), octets(CONTEXT, 8), ints(MANY, 16))
    memory = floats(MANY, (STREAMS + 1) * HIDDEN)
    yield "engram.fuse", engram.fuse, (streams, memory, wide(STREAMS, HIDDEN), 1e-20, floats(MANY, dtype=torch.bool))


def _records() -> Iterator[Case]:
    kinds: tuple[RecordKind, ...] = ("global", "index", "window", "global_bf16", "index_bf16")
    for kind in kinds:
        dim = INDEX_DIM if kind.startswith("index") else HEAD_DIM
        record = Record(dim, kind)
        pool, rows = octets(CONTEXT, record.nbytes), ints(MANY)
        yield f"records.write_records, {kind}", records.write_records, (pool, rows, floats(MANY, dim), record)
        yield f"records.read_records, {kind}", records.read_records, (pool, rows, record)
    yield "records.round_index", records.round_index, (floats(MANY, INDEX_HEADS, INDEX_DIM),)
    yield "compressor.pool_pairs", compressor.pool_pairs, (wide(MANY, 2, HEAD_DIM), wide(MANY, 2, HEAD_DIM))


CASES: list[Case] = [*_linear(), *_moe(), *_attention(), *_indexer(), *_rows(), *_records()]
