"""Router and expert MLPs (architecture.md 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_ced.formats import Weight
from sglang_ced.kernels.linear import linear, matmul
from sglang_ced.kernels.registry import joined, op
from sglang_ced.kernels.sums import add_up


class ExpertWeights(NamedTuple):
    """gate (w1) and up (w3) [inner, d], down (w2) [d, inner]."""

    w1: Weight
    w2: Weight
    w3: Weight


class Experts(tuple[ExpertWeights, ...]):
    """All experts of a layer. A fast version may keep in `prepared` what it derives from them and the shared one."""

    prepared: object = None


@op
def route(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """x bfloat16 [T, d], weight [E, d], bias float32 [E] -> (expert ids int64 [T, k], weights float32 [T, k]).

    Scores are sqrt(softplus(logit)). The bias chooses and does not weigh; equal scores go to the lower id.
    """
    logits = matmul(x, weight) / temperature
    scores = F.softplus(logits.double()).sqrt().float()
    chosen = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, chosen)
    return chosen, weights / (add_up(weights, -1) + 1e-20) * scale


@op
def expert_mlp(x: Tensor, weights: ExpertWeights, limit: float, row_weight: Tensor | None = None) -> Tensor:
    """Clamped SwiGLU of one expert: x bfloat16 [R, d], row_weight float32 [R] (applied before w2) -> bfloat16 [R,
    d]."""
    gate = linear(x, weights.w1).float().clamp_max(limit)
    up = linear(x, weights.w3).float().clamp(-limit, limit)
    inner = F.silu(gate.double()).float() * up
    if row_weight is not None:
        inner = inner * row_weight.unsqueeze(-1)
    return linear(inner.to(torch.bfloat16), weights.w2)


@op
def mixture(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: Sequence[ExpertWeights], shared: ExpertWeights, limit: float
) -> Tensor:
    """x bfloat16 [T, d] through its chosen experts and the shared one -> bfloat16 [T, d].

    Summed in float32 by ascending expert id, the shared expert last.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in chosen.unique().tolist():
        row, place = (chosen == index).nonzero(as_tuple=True)
        out.index_add_(0, row, expert_mlp(x[row], experts[index], limit, weights[row, place]).float())
    return (out + expert_mlp(x, shared, limit).float()).to(torch.bfloat16)


@joined
def feed_forward(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    top_k: int,
    scale: float,
    temperature: float,
    experts: Sequence[ExpertWeights],
    shared: ExpertWeights,
    limit: float,
) -> Tensor:
    """x bfloat16 [T, d] through the experts that `route` chooses for it: `mixture` -> bfloat16 [T, d]."""
    chosen, weights = route(x, gate, bias, top_k, scale, temperature)
    return mixture(x, chosen, weights, experts, shared, limit)
