"""Router: choices to the bit. Experts: within one step of what the second product takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_ced.formats import Weight
from sglang_ced.kernels import linear, moe
from sglang_ced.kernels.triton import moe as fast

LIMIT = 0.75  # low enough that both clamps act
FEW = settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes

# -- router -----------------------------------------------------------------------------------------------------------


def logits(rows: int, experts: int, seed: int) -> tuple[Tensor, Tensor]:
    """(x, weight) whose product is random logits, exactly: x picks one column of the weight per row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.eye(rows, 64).to(torch.bfloat16)
    weight = (4 * torch.randn(experts, 64, generator=generator)).to(torch.bfloat16)
    return x, weight


@FEW
@given(
    experts=st.integers(1, 40),
    top_k=st.integers(1, 8),
    temperature=st.sampled_from([1.0, 0.7]),
    ties=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_route_equals_reference_on_equal_logits(assert_same, move, experts, top_k, temperature, ties, seed) -> None:
    """Choices and weights to the bit."""
    x, weight = logits(4, experts, seed)
    bias = 0.1 * torch.randn(experts, generator=torch.Generator().manual_seed(seed))
    if ties:
        weight[::2], bias = weight[:1].clone(), torch.zeros(experts)
    args = (x, weight, bias, min(top_k, experts), 1.5, temperature)
    for actual, expected in zip(fast.route(*move(args)), moe.route.reference(*args), strict=True):
        assert_same(actual.cpu(), expected)


def test_route_equals_reference_at_the_ends_of_the_range(assert_same, move) -> None:
    """Logits far below underflow, near the bend of softplus and beyond; all of a row equal; no rows."""
    x, weight = logits(3, 8, 0)
    weight[:, 0] = torch.tensor([-1e30, -200.0, -90.0, -50.0, 19.9, 20.1, 1e30, 0.0]).to(torch.bfloat16)
    weight[:, 1], weight[:, 2] = -3e38, 0.5
    for rows in (x, x[:0]):
        args = (rows, weight, torch.zeros(8), 6, 1.5)
        for actual, expected in zip(fast.route(*move(args)), moe.route.reference(*args), strict=True):
            assert_same(actual.cpu(), expected)


def test_nan_logits_come_first_as_in_a_descending_sort(assert_same, make_weight, make_input, move) -> None:
    x, weight = make_input((4, 64)), make_weight("bfloat16", 8, 64)
    weight[5, 3] = weight[2, 9] = torch.nan
    args = (x, weight, torch.zeros(8), 3, 1.0)
    assert_same(fast.route(*move(args))[0].cpu(), moe.route.reference(*args)[0])


# -- experts ----------------------------------------------------------------------------------------------------------


def make_expert(make_weight, kind: str, d: int, inner: int, seed: int) -> moe.ExpertWeights:
    shapes = ((inner, d), (d, inner), (inner, d))
    return moe.ExpertWeights(*(make_weight(kind, n, k, 3 * seed + i) for i, (n, k) in enumerate(shapes)))


def full(weight: Weight) -> Tensor:
    return (weight if isinstance(weight, Tensor) else weight.dequantize()).double()


def error_of(x: Tensor, expert: moe.ExpertWeights, row_weight: Tensor | None = None) -> Tensor:
    """Each value between the products may be one step of its format away: 2^-3 of it for e4m3 and, as the larger of
    gate and up may be a step of bfloat16 away as well, 2^-5 for bfloat16."""
    gate, up = (linear.linear.reference(x, weight).double() for weight in (expert.w1, expert.w3))
    inner = torch.nn.functional.silu(gate.clamp_max(LIMIT)) * up.clamp(-LIMIT, LIMIT)
    inner = inner.abs() if row_weight is None else inner.abs() * row_weight.unsqueeze(-1)
    step = 2.0**-5 if isinstance(expert.w2, Tensor) else 2.0**-3
    return step * inner @ full(expert.w2).abs().T


@FEW
@given(
    kind=st.sampled_from(["e2m1", "e4m3", "bfloat16"]),
    rows=st.sampled_from([0, 1, 5, 18]),
    blocks=st.integers(1, 4),
    inner_blocks=st.integers(1, 3),
    weighted=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_expert_mlp_equals_reference(
    assert_near, make_weight, make_input, move, kind, rows, blocks, inner_blocks, weighted, seed
) -> None:
    d, inner = 32 * blocks, 32 * inner_blocks
    x, expert = 2 * make_input((rows, d), seed, 2), make_expert(make_weight, kind, d, inner, seed)
    row_weight = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) if weighted else None
    expected = moe.expert_mlp.reference(x, expert, LIMIT, row_weight)
    actual = fast.expert_mlp(move(x), move(expert), LIMIT, move(row_weight))
    assert_near(actual, expected, error_of(x, expert, row_weight))


@pytest.fixture(scope="module")
def experts(make_weight) -> tuple[list[moe.ExpertWeights], moe.ExpertWeights]:
    """Twelve fp4 experts and an fp8 one for all, as checkpoints have them."""
    routed = [make_expert(make_weight, "e2m1", 64, 32, e) for e in range(12)]
    return routed, make_expert(make_weight, "e4m3", 64, 32, 99)


def choose(rows: int, top_k: int, seed: int, popular: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    score = torch.rand(rows, 12, generator=generator)
    if popular:
        score[:, 4] += 1  # an expert that every row chooses
    return score.argsort(1, descending=True)[:, :top_k], torch.rand(rows, top_k, generator=generator)


def check_mixture(assert_near, move, x, chosen, weights, experts, shared) -> None:
    expected = moe.mixture.reference(x, chosen, weights, experts, shared, LIMIT)
    error = error_of(x, shared)
    for row, (ids, shares) in enumerate(zip(chosen, weights, strict=True)):
        for index, share in zip(ids, shares, strict=True):
            # the bfloat16 result of each expert may be a step away, and so may what is added to it
            error[row] += error_of(x[row : row + 1], experts[index], share[None])[0]
    error += 2.0**-7 * expected.double().abs()
    assert_near(fast.mixture(*move((x, chosen, weights, experts, shared)), LIMIT), expected, error)


@pytest.mark.parametrize(("rows", "top_k", "popular"), [(1, 3, False), (5, 12, False), (25, 3, True), (40, 2, False)])
def test_mixture_equals_reference(assert_near, make_input, move, experts, rows, top_k, popular) -> None:
    """Few pairs, each a block of its own, and many, sorted by expert, some experts with none and one with all."""
    x = 2 * make_input((rows, 64), rows)
    check_mixture(assert_near, move, x, *choose(rows, top_k, rows, popular), *experts)


def test_a_choice_made_twice_counts_twice(assert_near, make_input, move, experts) -> None:
    x, weights = make_input((2, 64)), torch.tensor([[0.5, 0.25], [0.5, 0.25]])
    check_mixture(assert_near, move, x, torch.tensor([[3, 3], [3, 1]]), weights, *experts)


def test_bfloat16_experts_are_served(assert_near, make_weight, make_input, move) -> None:
    experts = [make_expert(make_weight, "bfloat16", 64, 32, e) for e in range(12)]
    check_mixture(assert_near, move, make_input((5, 64)), *choose(5, 3, 0), experts, experts[0])


def test_addresses_are_kept_by_the_experts_they_belong_to(assert_same, make_input, move, experts) -> None:
    x, (chosen, weights) = move(make_input((2, 64))), move(choose(2, 3, 0))
    routed, shared = move(experts[0]), move(experts[1])
    kept = moe.Experts(routed)
    expected = fast.mixture(x, chosen, weights, routed, shared, LIMIT)
    for _ in range(2):
        assert_same(fast.mixture(x, chosen, weights, kept, shared, LIMIT), expected)
    other = moe.Experts(routed[::-1])
    assert_same(fast.mixture(x, 11 - chosen, weights, other, shared, LIMIT)[:, :0], expected[:, :0])
    assert not torch.equal(fast._addresses(other), fast._addresses(kept))


def test_experts_of_different_forms_are_refused(make_weight, make_input, experts) -> None:
    mixed = [experts[0][0], make_expert(make_weight, "e4m3", 64, 32, 1)]
    with pytest.raises(ValueError, match="expert 1: its weights differ from those of expert 0 in form or shape"):
        fast.mixture(make_input((1, 64)), torch.tensor([[0]]), torch.ones(1, 1), mixed, experts[1], LIMIT)
