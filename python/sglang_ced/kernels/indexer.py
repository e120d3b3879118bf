"""Which groups a token attends to: scores, top-k, candidate blocks (architecture.md 3.4, 3.5)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_ced.formats import record_of
from sglang_ced.kernels.registry import op


@op
def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """q bfloat16 [T, H, D], weights bfloat16 [T, H], keys uint8 [G, index record of D], packed or
    bfloat16 (their width tells) -> bfloat16 [T, G].

    sum_h relu(q_h . k) * w_h, rounded to bfloat16 after the dot, the product and the sum.
    """
    values = record_of(keys, q.shape[-1], "index").decode(keys).double()
    dots = torch.einsum("thd,gd->thg", q.double(), values).to(torch.bfloat16)
    weighted = dots.relu() * weights.unsqueeze(-1)
    return weighted.double().sum(1).to(torch.bfloat16)


@op
def index_scores_at(q: Tensor, weights: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
    """`index_scores` of the pool's keys at `slots`: int64 [G], for all rows, or [T, G], each row its own -> [T, G].

    A slot of -1 scores -inf.
    """
    if slots.dim() == 1:
        scores = index_scores(q, weights, pool[slots.clamp_min(0)])
    else:
        rows = [index_scores(q[r : r + 1], weights[r : r + 1], pool[own.clamp_min(0)]) for r, own in enumerate(slots)]
        scores = torch.cat(rows) if rows else q.new_empty(slots.shape)
    return scores.masked_fill(slots < 0, -torch.inf)


@op
def top_groups(scores: Tensor, k: int) -> Tensor:
    """The k best groups of each row: [T, G] -> int64 [T, min(k, G)] ascending, then -1 where fewer are visible.

    Hidden groups score -inf. Ties go to the lower index, so the batch's shape cannot show; NaN counts as hidden.
    """
    groups = scores.shape[-1]
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    best, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    k = min(k, groups)
    ids = torch.where(best[..., :k] == -torch.inf, groups, ids[..., :k]).sort(-1).values
    return torch.where(ids == groups, -1, ids)


@op
def candidate_groups(scores: Tensor, visible: Tensor, blocks: int, block_size: int) -> Tensor:
    """scores [T, G] (hidden = -inf), visible int64 [T] groups per row -> bool [T, G]: the groups of the best
    `blocks` blocks.

    The newest visible block is always kept.
    """
    groups = scores.shape[-1]
    best = F.pad(scores, (0, -groups % block_size), value=-torch.inf).unflatten(-1, (-1, block_size)).amax(-1)
    newest = torch.where(visible > 0, (visible - 1) // block_size, -1)
    pinned = torch.arange(best.shape[-1], device=scores.device) == newest[:, None]
    chosen = top_groups(torch.where(pinned, torch.inf, best), blocks)
    keep = torch.zeros(best.shape[0], best.shape[1] + 1, dtype=torch.bool, device=scores.device)
    keep.scatter_(1, torch.where(chosen < 0, best.shape[1], chosen), True)
    return keep[:, :-1].repeat_interleave(block_size, 1)[:, :groups]


def candidate_lists(chosen: Tensor) -> Tensor:
    """bool [T, G] -> int64 [T, C]: the chosen groups of each row, ascending, then -1; C as the longest needs."""
    counts = chosen.sum(1)
    row, group = chosen.nonzero(as_tuple=True)
    place = torch.arange(len(row), device=chosen.device) - (counts.cumsum(0) - counts)[row]
    longest = int(counts.max()) if len(counts) else 0
    out = torch.full((len(chosen), longest), -1, dtype=torch.int64, device=chosen.device)
    out[row, place] = group
    return out
