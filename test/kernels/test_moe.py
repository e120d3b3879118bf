"""Router and experts: the bits of the reference at every CPU level, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_kernel_ext
from sglang_ced.kernels import cpu, moe

LIMIT = 0.75  # low enough that both clamps act


def make_expert(make_weight, kind: str, d: int, inner: int, seed: int) -> moe.ExpertWeights:
    shapes = ((inner, d), (d, inner), (inner, d))
    return moe.ExpertWeights(*(make_weight(kind, n, k, 3 * seed + i) for i, (n, k) in enumerate(shapes)))


# -- router -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40),
    experts=st.integers(1, 40),
    top_k=st.integers(1, 8),
    temperature=st.sampled_from([1.0, 0.7]),
    ties=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_route_equals_reference(
    every_level, assert_same, make_weight, make_input, rows, experts, top_k, temperature, ties, seed
) -> None:
    x, weight = make_input((rows, 64), seed, 3), make_weight("bfloat16", experts, 64, seed + 1)
    bias = 0.1 * torch.randn(experts, generator=torch.Generator().manual_seed(seed))
    if ties:
        weight[::2], bias = weight[:1].clone(), torch.zeros(experts)
    args = (x, weight, bias, min(top_k, experts), 1.5, temperature)
    expected = moe.route.reference(*args)
    for _ in every_level():
        ids, weights = cpu.route(*args)
        assert_same(ids, expected[0])
        assert_same(weights, expected[1])


def test_nan_logits_come_first_as_in_a_descending_sort(assert_same, make_weight, make_input) -> None:
    x, weight = make_input((4, 64)), make_weight("bfloat16", 8, 64)
    weight[5, 3] = weight[2, 9] = torch.nan
    args = (x, weight, torch.zeros(8), 3, 1.0)
    assert_same(cpu.route(*args)[0], moe.route.reference(*args)[0])


# -- experts ----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["e2m1", "e4m3", "bfloat16"]),
    rows=st.integers(0, 70),
    blocks=st.integers(1, 4),
    inner_blocks=st.integers(1, 3),
    weighted=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_expert_mlp_equals_reference(
    every_level, assert_same, make_weight, make_input, kind, rows, blocks, inner_blocks, weighted, seed
) -> None:
    d, inner = 32 * blocks, 32 * inner_blocks
    x, expert = 2 * make_input((rows, d), seed, 2), make_expert(make_weight, kind, d, inner, seed)
    row_weight = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) if weighted else None
    expected = moe.expert_mlp.reference(x, expert, LIMIT, row_weight)
    for _ in every_level():
        assert_same(cpu.expert_mlp(x, expert, LIMIT, row_weight), expected)


@pytest.fixture(scope="module")
def experts(make_weight):
    """Twelve fp4 experts and an fp8 one for all, as checkpoints have them."""
    return [make_expert(make_weight, "e2m1", 96, 64, e) for e in range(12)], make_expert(
        make_weight, "e4m3", 96, 64, 99
    )


def choose(rows: int, top_k: int, seed: int, popular: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(rows, 12, generator=generator)
    if popular:
        score[:, 4] += 1  # an expert that every row chooses
    return score.argsort(1, descending=True)[:, :top_k], torch.rand(rows, top_k, generator=generator)


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 150), top_k=st.integers(1, 12), popular=st.booleans(), seed=st.integers(0, 2**31))
def test_mixture_equals_reference(every_level, assert_same, make_input, experts, rows, top_k, popular, seed) -> None:
    args = (2 * make_input((rows, 96), seed), *choose(rows, top_k, seed, popular), *experts, LIMIT)
    expected = moe.mixture.reference(*args)
    for _ in every_level():
        assert_same(cpu.mixture(*args), expected)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kept", [False, True])
def test_feed_forward_equals_reference(every_level, assert_same, make_weight, make_input, experts, rows, kept) -> None:
    routed = moe.Experts(experts[0]) if kept else experts[0]
    bias = torch.randn(12, generator=torch.Generator().manual_seed(1))
    args = (make_input((rows, 96)), make_weight("bfloat16", 12, 96), bias, 4, 1.5, 0.7, routed, experts[1], LIMIT)
    expected = moe.feed_forward.reference(*args)
    for _ in every_level():
        assert_same(cpu.feed_forward(*args), expected)


def test_experts_are_prepared_anew_for_another_shared_one(assert_same, make_weight, make_input, experts) -> None:
    routed, x, choice = moe.Experts(experts[0]), make_input((3, 96)), choose(3, 4, 0)
    for shared in (experts[1], make_expert(make_weight, "bfloat16", 96, 64, 7), experts[0][0]):
        assert_same(
            cpu.mixture(x, *choice, routed, shared, LIMIT), moe.mixture.reference(x, *choice, routed, shared, LIMIT)
        )


def test_a_choice_made_twice_counts_twice(assert_same, make_input, experts) -> None:
    x, weights = make_input((2, 96)), torch.tensor([[0.5, 0.25], [0.5, 0.25]])
    args = (x, torch.tensor([[3, 3], [3, 1]]), weights, *experts, LIMIT)
    assert_same(cpu.mixture(*args), moe.mixture.reference(*args))


def test_bfloat16_experts_are_served(assert_same, make_weight, make_input) -> None:
    experts = [make_expert(make_weight, "bfloat16", 64, 32, e) for e in range(12)]
    args = (make_input((5, 64)), *choose(5, 3, 0), experts, experts[0], LIMIT)
    assert_same(cpu.mixture(*args), moe.mixture.reference(*args))


# -- independence -----------------------------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_batch(every_level, assert_same, make_input, experts) -> None:
    x, (chosen, weights) = make_input((1500, 96)), choose(1500, 4, 0)
    for _ in every_level():
        whole = cpu.mixture(x, chosen, weights, *experts, LIMIT)
        for rows in (slice(0, 1), slice(7, 9), slice(1490, 1491), slice(1020, 1100)):
            assert_same(cpu.mixture(x[rows], chosen[rows], weights[rows], *experts, LIMIT), whole[rows])


def test_result_does_not_depend_on_threads(every_level, thread_counts, assert_same, make_input, experts) -> None:
    args = (make_input((70, 96)), *choose(70, 4, 1), *experts, LIMIT)
    for _ in every_level():
        expected = cpu.mixture(*args)
        for _ in thread_counts():
            assert_same(cpu.mixture(*args), expected)


# -- contract ---------------------------------------------------------------------------------------------------------


def test_an_expert_that_was_not_given_is_refused(make_input, experts) -> None:
    for wrong in (12, -1):
        with pytest.raises(IndexError, match=f"expert {wrong} is not among the 12 given"):
            cpu.mixture(make_input((2, 96)), torch.tensor([[3], [wrong]]), torch.ones(2, 1), *experts, LIMIT)


def test_bad_input_is_refused_by_shape_and_dtype(make_weight, make_input) -> None:
    codes, scales = cpu._parts([make_expert(make_weight, "e4m3", 64, 32, 0)])
    with pytest.raises(ValueError, match=r"w1 and w3 must be \[32, 96\].*codes of shapes \[32, 64\]"):
        sgl_kernel_ext.expert_mlp(make_input((2, 96)), codes, scales, False, LIMIT)
    with pytest.raises(TypeError, match=r"expert_mlp: x must be bfloat16, got Float of shape \[2, 64\]"):
        sgl_kernel_ext.expert_mlp(torch.zeros(2, 64), codes, scales, False, LIMIT)
    with pytest.raises(ValueError, match=r"row_weight must have shape \[2\], got \[3\]"):
        sgl_kernel_ext.expert_mlp(make_input((2, 64)), codes, scales, False, LIMIT, torch.ones(3))
    with pytest.raises(ValueError, match=r"Experts: some experts and one shared one are needed"):
        sgl_kernel_ext.Experts([], [], False, codes, scales, False)
    with pytest.raises(ValueError, match=r"route: top_k must be 1 to 8, got 9"):
        sgl_kernel_ext.route(make_input((2, 64)), torch.zeros(8, 64), torch.zeros(8), 9, 1.0, 1.0)
