"""Scores within a step of their roundings; selections to the bit, with ties, NaN and hidden groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sglang_ced.formats import Record
from sglang_ced.kernels import indexer
from sglang_ced.kernels.triton import indexer as fast

PHASES = [Phase.explicit, Phase.generate]  # shrinking takes minutes


@settings(max_examples=8, deadline=None, phases=PHASES)
@given(
    rows=st.sampled_from([0, 1, 3, 10]),
    heads=st.integers(1, 9),
    dim=st.sampled_from([32, 64, 96, 128]),
    groups=st.integers(0, 100),
    seed=st.integers(0, 2**31),
)
def test_index_scores_equal_reference(assert_near, move, make_query, rows, heads, dim, groups, seed) -> None:
    """A head's dot, and its product with the weight, may each be a step of bfloat16 away: 2^-6 of the term."""
    q, weights, keys = make_query(rows, heads, dim, groups, seed)
    dots = torch.einsum("thd,gd->thg", q.double(), Record(dim, "index").decode(keys).double()).relu()
    error = 2.0**-6 * (dots * weights.double().abs().unsqueeze(-1)).sum(1)
    expected = indexer.index_scores.reference(q, weights, keys)
    assert_near(fast.index_scores(*move((q, weights, keys))), expected, error)


def test_a_row_does_not_depend_on_its_batch(assert_same, move, make_query) -> None:
    q, weights, keys = move(make_query(11, 5, 64, 70, 0))
    whole = fast.index_scores(q, weights, keys)
    for rows in (slice(0, 1), slice(7, 9)):
        assert_same(fast.index_scores(q[rows], weights[rows], keys), whole[rows])
    assert_same(fast.index_scores(q[:1], weights[:1], keys[37:41]), whole[:1, 37:41])


@pytest.mark.parametrize("kind", ["index", "index_bf16"])
@pytest.mark.parametrize(("rows", "own"), [(0, True), (2, False), (11, False), (3, True)])
def test_scores_of_listed_keys_are_those_of_the_keys(assert_same, move, make_query, rows, own, kind) -> None:
    """One list for all rows, or one for each; -1 scores -inf."""
    q, weights, keys = make_query(rows, 5, 64, 90, 0)
    if kind == "index_bf16":
        keys = Record(64, "index").decode(keys).view(torch.uint8)
    slots = torch.randint(-30, 90, (rows, 75) if own else (75,), generator=torch.Generator().manual_seed(rows))
    slots = slots.clamp_min(-1)
    every = fast.index_scores(*move((q, weights, keys))).cpu()
    expected = every.gather(1, slots.clamp_min(0).expand(rows, -1)).masked_fill(slots < 0, -torch.inf)
    assert_same(fast.index_scores_at(*move((q, weights, keys, slots))).cpu(), expected)


def test_keys_may_be_stored_as_bfloat16(assert_same, move, make_query) -> None:
    q, weights, keys = make_query(2, 5, 96, 70, 0)
    plain = Record(96, "index").decode(keys).view(torch.uint8)
    assert_same(fast.index_scores(*move((q, weights, plain))), fast.index_scores(*move((q, weights, keys))))


@settings(max_examples=25, deadline=None, phases=PHASES)
@given(rows=st.integers(0, 3), groups=st.integers(1, 300), k=st.integers(0, 310), seed=st.integers(0, 2**31))
def test_top_groups_equal_reference(assert_same, move, make_scores, rows, groups, k, seed) -> None:
    scores, _ = make_scores(rows, groups, seed)
    assert_same(fast.top_groups(move(scores), k).cpu(), indexer.top_groups.reference(scores, k))


@pytest.mark.parametrize("k", [1, 500, 2500])
def test_top_groups_equal_reference_over_many_blocks(assert_same, move, make_scores, k) -> None:
    scores, _ = make_scores(1, 2500, 0)
    scores[:, ::2] = 1.0  # ties at the cut in every block
    assert_same(fast.top_groups(move(scores), k).cpu(), indexer.top_groups.reference(scores, k))


def test_topk_ties_nan_and_hidden_rows(move) -> None:
    nan, hidden = torch.nan, -torch.inf
    scores = torch.tensor([[3.0, nan, 1.0, 2.0, nan, 0.5], [1.0] * 6, [hidden] * 6, [-0.0, 0.0, -1.0, 0.0, -0.0, nan]])
    chosen = fast.top_groups(move(scores.to(torch.bfloat16)), 3).tolist()
    assert chosen == [[0, 2, 3], [0, 1, 2], [-1, -1, -1], [0, 1, 3]]


@settings(max_examples=25, deadline=None, phases=PHASES)
@given(
    rows=st.integers(0, 3),
    groups=st.integers(1, 300),
    blocks=st.integers(0, 40),
    block_size=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
def test_candidate_groups_equal_reference(
    assert_same, move, make_scores, rows, groups, blocks, block_size, seed
) -> None:
    scores, visible = make_scores(rows, groups, seed)
    expected = indexer.candidate_groups.reference(scores, visible, blocks, block_size)
    assert_same(fast.candidate_groups(*move((scores, visible)), blocks, block_size).cpu(), expected)


def test_float32_scores_take_the_reference(assert_same, move) -> None:
    scores = move(torch.randn(3, 50))
    assert_same(fast.top_groups(scores, 7), indexer.top_groups.reference(scores, 7))


def test_records_of_another_size_are_refused(make_query) -> None:
    q, weights, keys = make_query(2, 3, 32, 5, 0)
    with pytest.raises(ValueError, match="index record of 32 values takes 17 bytes"):
        fast.index_scores(q, weights, keys[:, :16])
    with pytest.raises(ValueError, match=r"slots must be \[G\] or \[2, G\], got shape \[3, 4\]"):
        fast.index_scores_at(q, weights, keys, torch.zeros(3, 4, dtype=torch.int64))
