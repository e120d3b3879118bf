"""Fast CPU versions of the ops, from the package `sgl-kernel-ext`. Registered on import, chosen by
`registry.activate`.

An installed package may be older than this file: an op whose functions it lacks keeps its reference, and one log line
says so.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from sglang_ced.formats import E2m1Weight, E4m3Weight, Record, Weight
from sglang_ced.kernels import attention, engram, indexer, linear, mhc, moe, norm, projection, records, rope
from sglang_ced.kernels.registry import Op

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

ext: Any = None
if importlib.util.find_spec("sgl_kernel_ext") is not None:
    import sgl_kernel_ext

    ext = sgl_kernel_ext

_missing: list[str] = []


def available() -> bool:
    """Whether sgl-kernel-ext is installed."""
    return ext is not None


def _fast(op: Op[P, R], *needs: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: register a version of `op` that calls the functions `needs`, if the package has them."""

    def keep(function: Callable[P, R]) -> Callable[P, R]:
        if ext is not None:
            lacking = [name for name in needs if not hasattr(ext, name)]
            _missing.extend(lacking)
            if not lacking:
                op.register("cpu")(function)
        return function

    return keep


def _is_wide(*tensors: Tensor) -> bool:
    """Whether any is of a dtype that only the references take (float64, float16)."""
    return any(t.dtype not in (torch.bfloat16, torch.float32) for t in tensors)


# -- linear -----------------------------------------------------------------------------------------------------------


@_fast(linear.round_input, "fake_quant_e4m3")
def round_input(x: Tensor) -> Tensor:
    result: Tensor = ext.fake_quant_e4m3(x.contiguous())
    return result


@_fast(linear.linear, "linear_e4m3", "linear_e2m1", "linear_bfloat16")
def linear_(x: Tensor, weight: Weight) -> Tensor:
    result: Tensor
    if isinstance(weight, E4m3Weight):
        result = ext.linear_e4m3(x.contiguous(), weight.codes, weight.scales)
    elif isinstance(weight, E2m1Weight):
        result = ext.linear_e2m1(x.contiguous(), weight.packed, weight.scales)
    elif _is_wide(x, weight):
        result = linear.linear.reference(x, weight)
    else:
        result = ext.linear_bfloat16(x.contiguous(), weight.contiguous())
    return result


@_fast(linear.matmul, "matmul")
def matmul(x: Tensor, weight: Tensor) -> Tensor:
    if _is_wide(x, weight):
        return linear.matmul.reference(x, weight)
    result: Tensor = ext.matmul(x.contiguous(), weight.contiguous())
    return result


@_fast(linear.grouped_linear, "grouped_linear")
def grouped_linear(x: Tensor, weight: Weight, groups: int) -> Tensor:
    codes, scales = _stored(weight)
    result: Tensor = ext.grouped_linear(x.contiguous(), codes, scales, groups)
    return result


def _stored(weight: Weight) -> tuple[Tensor, Tensor | None]:
    if isinstance(weight, E4m3Weight):
        return weight.codes, weight.scales
    if isinstance(weight, E2m1Weight):
        return weight.packed, weight.scales
    return weight.contiguous(), None


@_fast(projection.attention_inputs, "attention_inputs")
def attention_inputs(
    x: Tensor, weights: projection.InputWeights, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    a, q_norm, b, kv, kv_norm = weights
    if not (isinstance(a, E4m3Weight) and isinstance(b, E4m3Weight) and isinstance(kv, E4m3Weight)) or x.dim() != 2:
        return projection.attention_inputs.reference(x, weights, cos, sin, eps)
    result: tuple[Tensor, Tensor, Tensor] = ext.attention_inputs(
        x.contiguous(), a.codes, a.scales, q_norm, b.codes, b.scales, kv.codes, kv.scales, kv_norm, cos, sin, eps
    )
    return result


@_fast(projection.attention_output, "attention_output")
def attention_output(heads: Tensor, cos: Tensor, sin: Tensor, wo_a: Weight, wo_b: Weight, groups: int) -> Tensor:
    if not (isinstance(wo_a, E4m3Weight) and isinstance(wo_b, E4m3Weight)):
        return projection.attention_output.reference(heads, cos, sin, wo_a, wo_b, groups)
    result: Tensor = ext.attention_output(
        heads.contiguous(), cos, sin, wo_a.codes, wo_a.scales, groups, wo_b.codes, wo_b.scales
    )
    return result


# -- experts ----------------------------------------------------------------------------------------------------------


@_fast(moe.route, "route")
def route(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = ext.route(x.contiguous(), weight, bias, top_k, scale, temperature)
    return result


@_fast(moe.expert_mlp, "expert_mlp")
def expert_mlp(x: Tensor, weights: moe.ExpertWeights, limit: float, row_weight: Tensor | None = None) -> Tensor:
    form = _expert_form(weights)
    if form is None:
        return moe.expert_mlp.reference(x, weights, limit, row_weight)
    codes, scales = _parts([weights])
    result: Tensor = ext.expert_mlp(x.contiguous(), codes, scales, form is E2m1Weight, limit, row_weight)
    return result


@_fast(moe.mixture, "mixture", "Experts")
def mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    experts: Sequence[moe.ExpertWeights],
    shared: moe.ExpertWeights,
    limit: float,
) -> Tensor:
    prepared = _prepared(experts, shared)
    if prepared is None:
        return moe.mixture.reference(x, chosen, weights, experts, shared, limit)
    result: Tensor = ext.mixture(x.contiguous(), chosen.contiguous(), weights.contiguous(), prepared, limit)
    return result


@_fast(moe.feed_forward, "feed_forward", "Experts")
def feed_forward(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    top_k: int,
    scale: float,
    temperature: float,
    experts: Sequence[moe.ExpertWeights],
    shared: moe.ExpertWeights,
    limit: float,
) -> Tensor:
    prepared = _prepared(experts, shared)
    if prepared is None:
        return moe.feed_forward.reference(x, gate, bias, top_k, scale, temperature, experts, shared, limit)
    result: Tensor = ext.feed_forward(x.contiguous(), gate, bias, top_k, scale, temperature, prepared, limit)
    return result


def _expert_form(weights: moe.ExpertWeights) -> type[E4m3Weight] | type[E2m1Weight] | None:
    """The stored form that all three weights have; None for bfloat16, whose experts are three calls of `linear`."""
    for form in (E4m3Weight, E2m1Weight):
        if all(isinstance(weight, form) for weight in weights):
            return form
    return None


def _prepared(experts: Sequence[moe.ExpertWeights], shared: moe.ExpertWeights) -> Any:
    """The package's view of a layer's experts, made once for an `Experts`; None where it takes no such form."""
    if isinstance(experts, moe.Experts) and isinstance(experts.prepared, tuple) and experts.prepared[0] is shared:
        return experts.prepared[1]
    form, shared_form = _expert_form(experts[0]), _expert_form(shared)
    prepared = None
    if form is not None and shared_form is not None:
        prepared = ext.Experts(*_parts(experts), form is E2m1Weight, *_parts([shared]), shared_form is E2m1Weight)
    if isinstance(experts, moe.Experts):
        experts.prepared = (shared, prepared)
    return prepared


def _parts(experts: Iterable[moe.ExpertWeights]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [_stored(weight) for expert in experts for weight in expert]
    return [codes for codes, _ in pairs], [scales for _, scales in pairs if scales is not None]


# -- attention --------------------------------------------------------------------------------------------------------


@_fast(attention.join_keys, "join_keys")
def join_keys(window: Tensor, groups: Tensor | None, num_window_rows: int) -> Tensor:
    if groups is None or groups.shape[1] == 0:
        return window
    result: Tensor = ext.join_keys(window.contiguous(), groups.contiguous(), num_window_rows)
    return result


@_fast(attention.attend, "attend", "RECORD_KINDS")
def attend(q: Tensor, window: Tensor, pool: Tensor | None, keys: Tensor, sink: Tensor) -> Tensor:
    result: Tensor = ext.attend(q.contiguous(), window.contiguous(), pool, keys.contiguous(), sink)
    return result


# -- indexer ----------------------------------------------------------------------------------------------------------


@_fast(indexer.index_scores, "index_scores", "RECORD_KINDS")
def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    result: Tensor = ext.index_scores(q.contiguous(), weights.contiguous(), keys.contiguous())
    return result


@_fast(indexer.index_scores_at, "index_scores_at")
def index_scores_at(q: Tensor, weights: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
    result: Tensor = ext.index_scores_at(q.contiguous(), weights.contiguous(), pool, slots.contiguous())
    return result


@_fast(indexer.top_groups, "top_groups")
def top_groups(scores: Tensor, k: int) -> Tensor:
    if scores.dtype != torch.bfloat16:
        return indexer.top_groups.reference(scores, k)
    result: Tensor = ext.top_groups(scores.contiguous(), k)
    return result


@_fast(indexer.candidate_groups, "candidate_groups")
def candidate_groups(scores: Tensor, visible: Tensor, blocks: int, block_size: int) -> Tensor:
    if scores.dtype != torch.bfloat16:
        return indexer.candidate_groups.reference(scores, visible, blocks, block_size)
    result: Tensor = ext.candidate_groups(scores.contiguous(), visible.contiguous(), blocks, block_size)
    return result


# -- rows -------------------------------------------------------------------------------------------------------------


@_fast(norm.rms_norm, "rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if _is_wide(x, weight):
        return norm.rms_norm.reference(x, weight, eps)
    result: Tensor = ext.rms_norm(x.contiguous(), weight.contiguous(), eps)
    return result


@_fast(rope.rotate, "rotate")
def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    if x.dtype != torch.bfloat16:
        return rope.rotate.reference(x, cos, sin, inverse)
    result: Tensor = ext.rotate(x.contiguous(), cos.contiguous(), sin.contiguous(), inverse)
    return result


# -- hyper-connections ------------------------------------------------------------------------------------------------


@_fast(mhc.mixes, "mixes")
def mixes(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = ext.mixes(streams.contiguous(), fn, base, scale, iters, eps)
    return result


@_fast(mhc.enter, "enter")
def enter(
    streams: Tensor,
    weights: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iters: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor, Tensor] = ext.enter(
        streams.contiguous(), weights.contiguous(), norm_weight, norm_eps, fn, base, scale, iters, eps
    )
    return result


@_fast(mhc.collapse, "collapse")
def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    result: Tensor = ext.collapse(streams.contiguous(), weights.contiguous())
    return result


@_fast(mhc.expand, "expand")
def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    result: Tensor = ext.expand(y.contiguous(), streams.contiguous(), post.contiguous(), comb.contiguous())
    return result


# -- n-gram memory ----------------------------------------------------------------------------------------------------


@_fast(engram.look_up, "look_up", "read_rows")  # packages without read_rows have a look_up without `serial`
def look_up(codes: Tensor, scales: Tensor, rows: Tensor, serial: bool = False) -> Tensor:
    result: Tensor = ext.look_up(codes, scales, rows.contiguous(), serial)
    return result


@_fast(engram.read_rows, "read_rows")
def read_rows(fd: int, offset: int, rows: Tensor, out: Tensor) -> tuple[int, int]:
    result: tuple[int, int] = ext.read_rows(fd, offset, rows.contiguous(), out)
    return result


@_fast(engram.fuse, "fuse")
def fuse(streams: Tensor, keys_value: Tensor, qk_weight: Tensor, eps: float, alive: Tensor | None = None) -> Tensor:
    result: Tensor = ext.fuse(streams.contiguous(), keys_value.contiguous(), qk_weight, eps, alive)
    return result


# -- cache records ----------------------------------------------------------------------------------------------------


@_fast(records.write_records, "write_records", "RECORD_KINDS")
def write_records(pool: Tensor, rows: Tensor, values: Tensor, record: Record) -> None:
    if values.dtype != torch.bfloat16:
        return records.write_records.reference(pool, rows, values, record)
    ext.write_records(pool, rows.contiguous(), values.contiguous(), record.kind)
    return None


@_fast(records.read_records, "read_records", "RECORD_KINDS")
def read_records(pool: Tensor, rows: Tensor, record: Record) -> Tensor:
    result: Tensor = ext.read_records(pool, rows.contiguous(), record.dim, record.kind)
    return result


@_fast(records.exchange_records, "exchange_records")
def exchange_records(
    pool: Tensor, prior_rows: Tensor, kept_rows: Tensor, rows: Tensor, values: Tensor, record: Record
) -> Tensor:
    if values.dtype != torch.bfloat16:
        return records.exchange_records.reference(pool, prior_rows, kept_rows, rows, values, record)
    result: Tensor = ext.exchange_records(
        pool, prior_rows.contiguous(), kept_rows.contiguous(), rows.contiguous(), values.contiguous(), record.kind
    )
    return result


@_fast(records.round_index, "round_index")
def round_index(x: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16:
        return records.round_index.reference(x)
    result: Tensor = ext.round_index(x.contiguous())
    return result


if _missing:
    logger.warning(
        "sgl-kernel-ext %s is older than this package needs: no %s; their ops run as references. Install it anew.",
        getattr(ext, "__version__", "?"),
        ", ".join(dict.fromkeys(_missing)),
    )
