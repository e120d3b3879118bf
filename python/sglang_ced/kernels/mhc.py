"""Manifold-constrained hyper-connections: mixes, collapse, expand (architecture.md 2.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ced.kernels.linear import matmul
from sglang_ced.kernels.norm import inverse_rms, rms_norm
from sglang_ced.kernels.registry import joined, op
from sglang_ced.kernels.sums import add_up

NORM_EPS = 1e-20


@op
def mixes(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of one site from its input streams.

    streams bfloat16 [T, n, d]; fn float32 [n(n+2), n d], base float32 [n(n+2)], scale float32 [3]
    -> float32 pre [T, n] (for the next site), post [T, n], comb [T, n, n] (source, destination; doubly stochastic).
    """
    n, flat = streams.shape[-2], streams.flatten(-2).float()
    pre, post, comb = (matmul(flat, fn) * inverse_rms(flat, NORM_EPS)).split((n, n, n * n), -1)
    pre = _sigmoid(pre * scale[0] + base[:n]) + eps
    post = 2 * _sigmoid(post * scale[1] + base[n : 2 * n])
    comb = (comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
    return pre, post, sinkhorn(comb, iters, eps)


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """float32 [T, n, n] -> row softmax, then columns and rows normalised in turn, ending on columns."""
    comb = torch.softmax(logits.double(), -1).float() + eps
    comb = comb / (add_up(comb, -2) + eps)
    for _ in range(iters - 1):
        comb = comb / (add_up(comb, -1) + eps)
        comb = comb / (add_up(comb, -2) + eps)
    return comb


def _sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x.double()).float()


@op
def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of streams [T, n, d] by float32 [T, n] -> bfloat16 [T, d]."""
    return add_up(streams.float() * weights.unsqueeze(-1), -2).squeeze(-2).to(torch.bfloat16)


@joined
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
    """What a site begins with: the normed `collapse` of its streams, bfloat16 [T, d], and their `mixes`."""
    pre, post, comb = mixes(streams, fn, base, scale, iters, eps)
    return rms_norm(collapse(streams, weights), norm_weight, norm_eps), pre, post, comb


@op
def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """y [T, d] written back to the mixed streams [T, n, d] by post [T, n] and comb [T, n, n] -> bfloat16 [T, n, d]."""
    mixed = add_up(comb.unsqueeze(-1) * streams.float().unsqueeze(-2), -3).squeeze(-3)
    return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + mixed).to(torch.bfloat16)
