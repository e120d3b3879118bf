"""Short sums in a written order, for every op whose rounding depends on it."""

from __future__ import annotations

from torch import Tensor


def add_up(x: Tensor, dim: int) -> Tensor:
    """Sum of a few terms, first to last, in the dtype of x; the dimension stays with size 1."""
    terms: tuple[Tensor, ...] = x.split(1, dim)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
