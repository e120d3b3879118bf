"""Two systems on the same questions: McNemar's exact test, and how much accuracy may have been lost.

Of `n` questions, `lost` are right in the baseline alone and `gained` in the candidate alone; the loss is
(lost - gained) / n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

CONFIDENCE = 0.95  # of one-sided bounds
Z = NormalDist().inv_cdf(CONFIDENCE)


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided exact p of `lost` against `gained`, if both ways were equally likely: min(1, 2 P(X <= smaller)).

    McNemar 1947, in the exact binomial form.
    """
    flips, fewer = lost + gained, min(lost, gained)
    tail = sum(math.comb(flips, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**flips)


def standard_error(lost: int, gained: int, n: int) -> float:
    """Standard error of the loss over independent pairs."""
    return math.sqrt(max(0.0, lost + gained - (lost - gained) ** 2 / n)) / n


def clustered_error(differences: Mapping[str, Sequence[int]]) -> float:
    """Standard error of the mean difference where questions of one group may flip together.

    differences: group -> baseline right minus candidate right, of each of its questions. With one question in each
    group this is `standard_error`, but for the factor sqrt(g / (g - 1)) of g groups.
    """
    n, groups = sum(map(len, differences.values())), len(differences)
    mean = sum(map(sum, differences.values())) / n
    squares = sum((sum(group) - len(group) * mean) ** 2 for group in differences.values())
    return math.sqrt(squares * groups / (groups - 1)) / n if groups > 1 else math.inf


def score_bound(lost: int, gained: int, n: int, confidence: float = CONFIDENCE) -> float:
    """One-sided upper bound of the loss: the largest value that the score test of Tango (1998) does not reject.

    Unlike the normal bound it does not collapse to 0 without flips: then it is z^2 / (n + z^2).
    """
    if n <= 0:
        raise ValueError("no questions to compare")
    z = NormalDist().inv_cdf(confidence)
    low, high = (lost - gained) / n, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _score(lost, gained, n, middle) > -z else (low, middle)
    return high


def _score(lost: int, gained: int, n: int, loss: float) -> float:
    """Standardised distance of the counts from a true loss; the flip rate is the likeliest one for it."""
    a, b, c = 2 * n, (2 * n - lost + gained) * loss - lost - gained, -gained * loss * (1 - loss)
    rate = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)  # of `gained` flips, under the true loss
    variance = n * (2 * rate + loss * (1 - loss))
    distance = lost - gained - n * loss
    return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance) if distance else 0.0


def pass_probability(n: int, margin: float, flips: float, confidence: float = CONFIDENCE) -> float:
    """Chance that a candidate without a loss passes, by the normal approximation: `flips` of all questions flip."""
    error = math.sqrt(flips / n)
    return NormalDist().cdf(margin / error - NormalDist().inv_cdf(confidence))
