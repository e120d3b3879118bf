"""The statistics, against values known by other ways."""

from __future__ import annotations

import math

import paired
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, norm

COUNTS = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 900)).filter(lambda c: sum(c) > 0)


@given(COUNTS)
def test_mcnemar_is_the_exact_binomial_test(counts: tuple[int, int, int]) -> None:
    lost, gained, _ = counts
    expected = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    assert paired.mcnemar(lost, gained) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_of_textbook_counts() -> None:
    assert paired.mcnemar(0, 0) == 1
    assert paired.mcnemar(0, 5) == pytest.approx(2 / 2**5)
    assert paired.mcnemar(1, 9) == pytest.approx(2 * 11 / 2**10)


@given(st.integers(1, 5000))
def test_without_flips_the_bound_has_a_closed_form(n: int) -> None:
    z = norm.ppf(0.95)
    assert paired.score_bound(0, 0, n) == pytest.approx(z * z / (n + z * z), rel=1e-6)


@given(COUNTS)
def test_the_bound_solves_the_score_equation(counts: tuple[int, int, int]) -> None:
    """At the bound, the likeliest flip rates of that loss (found by search, not by formula) put the counts z below."""
    lost, gained, same = counts
    n = lost + gained + same
    bound = paired.score_bound(lost, gained, n)
    assert (lost - gained) / n <= bound <= 1
    if bound > 0.999:
        return

    def likelihood(rate: float) -> float:  # of gained flips; lost ones come at rate + bound
        parts = ((lost, rate + bound), (gained, rate), (same, 1 - 2 * rate - bound))
        return sum(count * math.log(max(share, 1e-300)) for count, share in parts if count)

    low, high = max(0.0, -bound), (1 - bound) / 2
    for _ in range(200):
        a, b = low + (high - low) * 0.382, low + (high - low) * 0.618
        low, high = (low, b) if likelihood(a) > likelihood(b) else (a, high)
    variance = n * (2 * low + bound * (1 - bound))
    assert (lost - gained - n * bound) / math.sqrt(variance) == pytest.approx(-norm.ppf(0.95), abs=1e-3)


@pytest.mark.parametrize(("loss", "flips"), [(0.02, 0.02), (0.02, 0.05), (0.05, 0.05)])
def test_a_true_loss_is_below_the_bound_as_often_as_promised(loss: float, flips: float) -> None:
    """Over all outcomes of 200 questions, weighed by their probability."""
    n, covered = 200, 0.0
    to_lose = (flips + loss) / 2 / flips
    for count in range(31):
        for lost in range(count + 1):
            weight = binom.pmf(count, n, flips) * binom.pmf(lost, count, to_lose)
            covered += weight * (paired.score_bound(lost, count - lost, n) >= loss)
    assert covered > 0.93  # the score bound holds its level on average, not at each point


def test_groups_of_one_have_the_error_of_independent_pairs() -> None:
    flips = [1] * 7 + [-1] * 3 + [0] * 90
    alone = paired.clustered_error({str(i): [flip] for i, flip in enumerate(flips)})
    assert alone == pytest.approx(paired.standard_error(7, 3, 100) * math.sqrt(100 / 99))


def test_groups_that_flip_together_have_a_larger_error() -> None:
    together = paired.clustered_error({str(i): [1 if i < 5 else 0] * 4 for i in range(50)})
    assert together == pytest.approx(2 * paired.standard_error(20, 0, 200), rel=0.02)


def test_eight_hundred_questions_see_two_points() -> None:
    """What the documentation says: with 3 % of flips and no loss, nearly all runs pass a margin of 2 points."""
    assert paired.pass_probability(800, 0.02, 0.03) == pytest.approx(0.95, abs=0.01)
    assert paired.score_bound(16, 0, 800) > 0.02


def test_no_questions_have_no_bound() -> None:
    with pytest.raises(ValueError, match="no questions"):
        paired.score_bound(0, 0, 0)
