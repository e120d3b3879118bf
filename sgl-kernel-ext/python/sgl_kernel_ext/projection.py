"""The projections around attention: chains of e4m3 linears, norms and rotations, one call each."""

from __future__ import annotations

from torch import Tensor

from sgl_kernel_ext._library import fake, ops


def attention_inputs(
    x: Tensor,
    wq_a: Tensor,
    wq_a_scales: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wq_b_scales: Tensor,
    wkv: Tensor,
    wkv_scales: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """rotate(wq_b q_lora), q_lora = rms_norm(wq_a x), and fake_quant_e4m3(rotate(rms_norm(wkv x))).

    Args:
        x: bfloat16 [T, d]; wq_a [Q, d], wq_b [H D, Q] and wkv [D, d]: codes and scales as `linear_e4m3` takes them.
        q_norm [Q], kv_norm [D]: bfloat16 or float32; cos, sin: float32 [T, F]. All contiguous.

    Returns:
        bfloat16 [T, H, D], [T, Q] and [T, D].

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit, or a tensor is not contiguous.
    """
    q, q_lora, kv = _attention_inputs(
        x, wq_a, wq_a_scales, q_norm, wq_b, wq_b_scales, wkv, wkv_scales, kv_norm, cos, sin, eps
    )
    return q, q_lora, kv


def attention_output(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    wo_a: Tensor,
    wo_a_scales: Tensor,
    groups: int,
    wo_b: Tensor,
    wo_b_scales: Tensor,
) -> Tensor:
    """linear_e4m3(grouped_linear(rotate(heads, inverse), wo_a, groups), wo_b).

    Args:
        heads: bfloat16 [T, H, D]; wo_a [groups R, H D / groups] and wo_b [d, groups R]: e4m3 codes and scales.

    Returns:
        bfloat16 [T, d].

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit, or a tensor is not contiguous.
    """
    result: Tensor = _attention_output(heads, cos, sin, wo_a, wo_a_scales, groups, wo_b, wo_b_scales)
    return result


def _input_shapes(
    x: Tensor, wq_a: Tensor, _a: Tensor, _n: Tensor, wq_b: Tensor, _b: Tensor, wkv: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    rows, dim = x.shape[0], wkv.shape[0]
    return x.new_empty((rows, wq_b.shape[0] // dim, dim)), x.new_empty((rows, wq_a.shape[0])), x.new_empty((rows, dim))


_attention_inputs, _attention_output = ops.attention_inputs.default, ops.attention_output.default
fake("sgl_kernel_ext::attention_inputs", _input_shapes)
fake(
    "sgl_kernel_ext::attention_output",
    lambda heads, cos, sin, wo_a, a, groups, wo_b, b: heads.new_empty((heads.shape[0], wo_b.shape[0])),
)
