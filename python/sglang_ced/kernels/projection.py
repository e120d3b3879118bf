"""The projections around attention, each a chain of linears, norms and rotations (architecture.md 3.1)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sglang_ced.formats import Weight
from sglang_ced.kernels.linear import grouped_linear, linear, round_input
from sglang_ced.kernels.norm import rms_norm
from sglang_ced.kernels.registry import joined
from sglang_ced.kernels.rope import rotate


class InputWeights(NamedTuple):
    """wq_a [q_lora, d], wq_b [heads * D, q_lora], wkv [D, d]; the norms of what wq_a and wkv give."""

    wq_a: Weight
    q_norm: Tensor
    wq_b: Weight
    wkv: Weight
    kv_norm: Tensor


@joined
def attention_inputs(
    x: Tensor, weights: InputWeights, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x bfloat16 [T, d], angles float32 [T, F] -> bfloat16 q [T, heads, D], rotated; q_lora [T, q_lora], normed; and
    the window's kv [T, D], normed, rotated and rounded to e4m3."""
    q_lora = rms_norm(linear(x, weights.wq_a), weights.q_norm, eps)
    q = linear(q_lora, weights.wq_b).unflatten(-1, (-1, weights.kv_norm.shape[0]))
    kv = rotate(rms_norm(linear(x, weights.wkv), weights.kv_norm, eps), cos, sin)
    return rotate(q, cos, sin), q_lora, round_input(kv)


@joined
def attention_output(heads: Tensor, cos: Tensor, sin: Tensor, wo_a: Weight, wo_b: Weight, groups: int) -> Tensor:
    """What the heads found, bfloat16 [T, heads, D], rotated back and projected: wo_a [groups * R, heads * D / groups],
    wo_b [d, groups * R] -> bfloat16 [T, d]."""
    out = rotate(heads, cos, sin, inverse=True).flatten(1)
    return linear(grouped_linear(out, wo_a, groups), wo_b)
