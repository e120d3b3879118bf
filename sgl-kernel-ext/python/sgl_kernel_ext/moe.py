"""Router and SwiGLU experts with stored weights. A row's result depends on nothing but the row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_kernel_ext._library import fake, ops


def route(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Scores sqrt(softplus(x W^T / temperature)); the `top_k` best of score + bias, the lower id first among equals.

    Args:
        x: bfloat16 [T, d]; weight: bfloat16 or float32 [E, d]; bias: float32 [E]. All contiguous.

    Returns:
        ids int64 [T, top_k], best first; weights float32 [T, top_k]: score / (sum of scores + 1e-20) * scale.

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit, or `top_k` is not 1 to E.
    """
    chosen, weights = _route(x, weight, bias, top_k, scale, temperature)
    return chosen, weights


def expert_mlp(
    x: Tensor,
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    is_e2m1: bool,
    limit: float,
    row_weight: Tensor | None = None,
) -> Tensor:
    """w2(bfloat16(silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit) * row_weight)) of one expert.

    Args:
        x: bfloat16 [R, d], contiguous.
        codes, scales: of w1 [inner, d], w2 [d, inner], w3 [inner, d], in this order, as `linear_e4m3` or, if `is_e2m1`,
            `linear_e2m1` takes them.
        row_weight: float32 [R].

    Returns:
        bfloat16 [R, d].

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit.
    """
    result: Tensor = _expert_mlp(x, codes, scales, is_e2m1, limit, row_weight)
    return result


Experts = torch.classes.sgl_kernel_ext.Experts
"""Experts(codes, scales, is_e2m1, shared_codes, shared_scales, shared_is_e2m1): a layer's experts, three codes and
scales each as `expert_mlp` takes them, and the shared one. Checked once; raises as `expert_mlp` does."""


def mixture(x: Tensor, chosen: Tensor, weights: Tensor, experts: Any, limit: float) -> Tensor:
    """Each row through its chosen experts and the shared one, as `expert_mlp`; float32 sum by ascending expert id.

    Args:
        x: bfloat16 [T, d]; chosen: int64 [T, k] expert ids; weights: float32 [T, k]. All contiguous.
        experts: an `Experts`.

    Returns:
        bfloat16 [T, d].

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit. IndexError: there is no such expert.
    """
    result: Tensor = _mixture(x, chosen, weights, experts, limit)
    return result


def feed_forward(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    top_k: int,
    scale: float,
    temperature: float,
    experts: Any,
    limit: float,
) -> Tensor:
    """mixture(x, *route(x, gate, bias, top_k, scale, temperature), experts, limit): one call."""
    result: Tensor = _feed_forward(x, gate, bias, top_k, scale, temperature, experts, limit)
    return result


def _route_shapes(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)


_route, _expert_mlp, _mixture, _feed_forward = (
    each.default for each in (ops.route, ops.expert_mlp, ops.mixture, ops.feed_forward)
)
fake("sgl_kernel_ext::route", _route_shapes)
fake("sgl_kernel_ext::expert_mlp", lambda x, *_: torch.empty_like(x))
fake("sgl_kernel_ext::mixture", lambda x, *_: torch.empty_like(x))
fake("sgl_kernel_ext::feed_forward", lambda x, *_: torch.empty_like(x))
