"""Scores of groups by index keys, and the choice of the best."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kernel_ext._library import fake, ops


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """sum over heads of relu(q . k) * weight, rounded to bfloat16 after the dot, the product and the sum (float64).

    Args:
        q: bfloat16 [T, H, D], D a multiple of 32; weights: bfloat16 [T, H]; keys: uint8 [G, D/2 + D/32], packed e2m1
            (even index in the low nibble), then one ue8m0 scale per 32, or uint8 [G, 2 * D], bfloat16. All contiguous.

    Returns:
        bfloat16 [T, G].

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit, or a tensor is not contiguous.
    """
    result: Tensor = _index_scores(q, weights, keys)
    return result


def index_scores_at(q: Tensor, weights: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
    """`index_scores` of the keys at `slots`, read where they lie; -inf where a slot is negative.

    Args:
        q, weights, keys: as for `index_scores`; slots: int64 [G], the same for all rows, or [T, G].

    Returns:
        bfloat16 [T, G].

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit, or a tensor is not contiguous. IndexError: a slot is
        beyond the keys.
    """
    result: Tensor = _index_scores_at(q, weights, keys, slots)
    return result


def top_groups(scores: Tensor, k: int) -> Tensor:
    """The k best of each row, bfloat16 [T, G] -> int64 [T, min(k, G)] ascending, then -1 where fewer are above -inf.

    Ties go to the lower index; NaN counts as -inf.
    """
    result: Tensor = _top_groups(scores, k)
    return result


def candidate_groups(scores: Tensor, visible: Tensor, blocks: int, block_size: int) -> Tensor:
    """Which groups lie in the `blocks` best blocks of `block_size`, by a block's largest score.

    Args:
        scores: bfloat16 [T, G]; visible: int64 [T], groups that a row sees: the last block of these is always chosen.

    Returns:
        bool [T, G].

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit. IndexError: a row sees more than G groups.
    """
    result: Tensor = _candidate_groups(scores, visible, blocks, block_size)
    return result


_index_scores, _top_groups = ops.index_scores.default, ops.top_groups.default
_index_scores_at = ops.index_scores_at.default
_candidate_groups = ops.candidate_groups.default
fake("sgl_kernel_ext::index_scores", lambda q, weights, keys: q.new_empty((q.shape[0], keys.shape[0])))
fake("sgl_kernel_ext::index_scores_at", lambda q, weights, keys, slots: q.new_empty((q.shape[0], slots.shape[-1])))
fake(
    "sgl_kernel_ext::top_groups",
    lambda scores, k: scores.new_empty((scores.shape[0], min(k, scores.shape[1])), dtype=torch.int64),
)
fake("sgl_kernel_ext::candidate_groups", lambda scores, *_: torch.empty_like(scores, dtype=torch.bool))
