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
