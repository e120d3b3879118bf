"""Hyper-connections: the weights of a site, and the sums over streams they are used in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_kernel_ext._library import fake, ops


def mixes(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of one site: m = (fn v) / sqrt(mean(v^2) + 1e-20) of the flattened streams v, summed as in `matmul`.

    Args:
        streams: bfloat16 [T, n, d], n at most 8; fn: float32 [n (n + 2), n d]; base: float32 [n (n + 2)];
            scale: float32 [3]. All contiguous.
        iters: rounds of normalising the columns; there is one less of the rows.

    Returns:
        float32 pre [T, n] = sigmoid(m scale0 + base) + eps, post [T, n] = 2 sigmoid(m scale1 + base), and comb
        [T, n, n] = m scale2 + base after a softmax of its rows, + eps, and Sinkhorn's iteration.

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit, or a tensor is not contiguous.
    """
    pre, post, comb = _mixes(streams, fn, base, scale, iters, eps)
    return pre, post, comb


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of streams, bfloat16 [T, n, d] by float32 [T, n] -> bfloat16 [T, d]. float32, first to last."""
    result: Tensor = _collapse(streams, weights)
    return result


def enter(
    streams: Tensor,
    weights: Tensor,
    norm: Tensor,
    norm_eps: float,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iters: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """rms_norm(collapse(streams, weights), norm, norm_eps), bfloat16 [T, d], and the three of `mixes`: one call."""
    x, pre, post, comb = _enter(streams, weights, norm, norm_eps, fn, base, scale, iters, eps)
    return x, pre, post, comb


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """post[k] y + sum over j of comb[j, k] streams[j], in float32, j ascending.

    Args:
        y: bfloat16 [T, d]; streams: bfloat16 [T, n, d]; post: float32 [T, n]; comb: float32 [T, n, n]. All contiguous.

    Returns:
        bfloat16 [T, n, d].
    """
    result: Tensor = _expand(y, streams, post, comb)
    return result


def _mixes_shapes(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, n = streams.shape[:2]
    shapes = ((rows, n), (rows, n), (rows, n, n))
    pre, post, comb = (fn.new_empty(shape) for shape in shapes)
    return pre, post, comb


def _enter_shapes(
    streams: Tensor, weights: Tensor, norm: Tensor, norm_eps: float, *site: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return streams.new_empty((streams.shape[0], streams.shape[2])), *_mixes_shapes(streams, *site)


_mixes, _collapse, _enter, _expand = (each.default for each in (ops.mixes, ops.collapse, ops.enter, ops.expand))
fake("sgl_kernel_ext::enter", _enter_shapes)
fake("sgl_kernel_ext::mixes", _mixes_shapes)
fake("sgl_kernel_ext::collapse", lambda streams, weights: streams.new_empty((streams.shape[0], streams.shape[2])))
fake("sgl_kernel_ext::expand", lambda y, streams, post, comb: torch.empty_like(streams))
