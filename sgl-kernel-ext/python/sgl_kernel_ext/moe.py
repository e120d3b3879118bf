"""Router and SwiGLU experts with stored weights. A row's result depends on nothing but the row."""

from __future__ import annotations

from collections.abc import Sequence

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


def mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    ids: Sequence[int],
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    is_e2m1: bool,
    shared_codes: Sequence[Tensor],
    shared_scales: Sequence[Tensor],
    shared_is_e2m1: bool,
    limit: float,
) -> Tensor:
    """Each row through its chosen experts and the shared one, as `expert_mlp`; float32 sum by ascending expert id.

    Args:
        x: bfloat16 [T, d]; chosen: int64 [T, k] expert ids; weights: float32 [T, k]. All contiguous.
        ids: the expert ids that occur in `chosen` (or more), ascending; codes, scales: three per id.
        shared_codes, shared_scales: three of the shared expert.

    Returns:
        bfloat16 [T, d].

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit, or an expert of `chosen` is not in `ids`.
    """
    result: Tensor = _mixture(
        x, chosen, weights, ids, codes, scales, is_e2m1, shared_codes, shared_scales, shared_is_e2m1, limit
    )
    return result


def _route_shapes(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)


_route, _expert_mlp, _mixture = ops.route.default, ops.expert_mlp.default, ops.mixture.default
fake("sgl_kernel_ext::route", _route_shapes)
fake("sgl_kernel_ext::expert_mlp", lambda x, *_: torch.empty_like(x))
fake("sgl_kernel_ext::mixture", lambda x, *_: torch.empty_like(x))
