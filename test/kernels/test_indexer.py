"""Index scores and choice of groups: the bits of the reference at every CPU level, with ties, NaN and hidden groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_kernel_ext
from sglang_ced.formats import Record, fake_quant_e2m1_ue8m0
from sglang_ced.kernels import cpu, indexer


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 9),
    heads=st.integers(1, 9),
    dim=st.sampled_from([32, 64, 128]),
    groups=st.integers(0, 100),
    seed=st.integers(0, 2**31),
)
def test_index_scores_equal_reference(every_level, assert_same, make_query, rows, heads, dim, groups, seed) -> None:
    case = make_query(rows, heads, dim, groups, seed)
    expected = indexer.index_scores.reference(*case)
    for _ in every_level():
        assert_same(cpu.index_scores(*case), expected)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    heads=st.integers(1, 9),
    dim=st.sampled_from([32, 64, 96, 128, 160]),
    groups=st.integers(1, 70),
    spread=st.sampled_from([0, 3, 12, 60]),
    on_grid=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_queries_and_keys_of_any_range_equal_reference(
    every_level, assert_same, make_input, make_query, rows, heads, dim, groups, spread, on_grid, seed
) -> None:
    """Scales far apart, blocks of zeros, queries that are not small integers, NaN scales and weights beside numbers."""
    q, weights, keys = make_query(rows, heads, dim, groups, seed)
    q = make_input((rows, heads, dim), seed, spread)
    q[..., :32] *= seed % 2
    q = fake_quant_e2m1_ue8m0(q) if on_grid else q
    values = make_input((groups, dim), seed + 2, spread)
    values[::3, -32:] = 0
    keys = Record(dim, "index").encode(values)
    keys[5::17, -1] = 255
    weights[-1:, 0] = torch.nan
    expected = indexer.index_scores.reference(q, weights, keys)
    for _ in every_level():
        assert_same(cpu.index_scores(q, weights, keys), expected)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 6),
    groups=st.integers(0, 70),
    pool=st.integers(1, 90),
    shared=st.booleans(),
    kind=st.sampled_from(["index", "index_bf16"]),
    seed=st.integers(0, 2**31),
)
def test_scores_at_slots_equal_reference(
    every_level, assert_same, make_input, make_query, rows, groups, pool, shared, kind, seed
) -> None:
    q, weights, _ = make_query(rows, 3, 64, 1, seed)
    keys = Record(64, kind).encode(make_input((pool, 64), seed + 2, 2))
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, pool, (groups,) if shared else (rows, groups), generator=generator)
    expected = indexer.index_scores_at.reference(q, weights, keys, slots)
    for _ in every_level():
        assert_same(cpu.index_scores_at(q, weights, keys, slots), expected)


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 5), groups=st.integers(1, 60), share=st.floats(0, 1), k=st.integers(0, 70),
    seed=st.integers(0, 2**31),
)  # fmt: skip
def test_choice_among_listed_candidates_is_the_choice_among_masked_ones(
    make_scores, rows, groups, share, k, seed
) -> None:
    scores, _ = make_scores(rows, groups, seed)
    allowed = torch.rand(rows, groups, generator=torch.Generator().manual_seed(seed)) < share
    lists = indexer.candidate_lists(allowed)
    assert [[g for g in row if g >= 0] for row in lists.tolist()] == [
        row.nonzero().flatten().tolist() for row in allowed
    ]
    expected = indexer.top_groups.reference(scores.masked_fill(~allowed, -torch.inf), k)
    own = torch.where(lists < 0, -torch.inf, scores.gather(1, lists.clamp_min(0)))
    chosen = indexer.top_groups.reference(own, k)
    chosen = torch.where(chosen < 0, -1, lists.gather(1, chosen.clamp_min(0)))
    assert chosen.tolist() == [row[: chosen.shape[1]] for row in expected.tolist()]
    assert (expected[:, chosen.shape[1] :] == -1).all()


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(0, 9),
    heads=st.integers(1, 9),
    dim=st.sampled_from([32, 64, 128]),
    groups=st.integers(0, 100),
    seed=st.integers(0, 2**31),
)
def test_keys_of_bfloat16_give_the_bits_of_packed_ones(
    every_level, make_input, make_query, rows, heads, dim, groups, seed
) -> None:
    q, weights, packed = make_query(rows, heads, dim, groups, seed)
    plain = Record(dim, "index_bf16").encode(make_input((groups, dim), seed + 2, 2))
    expected = indexer.index_scores.reference(q, weights, packed)
    assert torch.equal(indexer.index_scores.reference(q, weights, plain), expected)
    for _ in every_level():
        assert torch.equal(
            cpu.index_scores(q, weights, plain).view(torch.int16),
            cpu.index_scores(q, weights, packed).view(torch.int16),
        )


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(0, 9), groups=st.integers(1, 300), k=st.integers(0, 310), seed=st.integers(0, 2**31))
def test_top_groups_equal_reference(assert_same, make_scores, rows, groups, k, seed) -> None:
    scores, _ = make_scores(rows, groups, seed)
    assert_same(cpu.top_groups(scores, k), indexer.top_groups.reference(scores, k))


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(0, 9),
    groups=st.integers(1, 300),
    blocks=st.integers(0, 40),
    block_size=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
def test_candidate_groups_equal_reference(assert_same, make_scores, rows, groups, blocks, block_size, seed) -> None:
    scores, visible = make_scores(rows, groups, seed)
    expected = indexer.candidate_groups.reference(scores, visible, blocks, block_size)
    assert_same(cpu.candidate_groups(scores, visible, blocks, block_size), expected)


def test_float32_scores_take_the_reference(assert_same) -> None:
    scores = torch.randn(3, 50)
    assert_same(cpu.top_groups(scores, 7), indexer.top_groups.reference(scores, 7))


def test_a_row_does_not_depend_on_its_batch(every_level, assert_same, make_query) -> None:
    q, weights, keys = make_query(20, 5, 64, 90, 0)
    for _ in every_level():
        whole = cpu.index_scores(q, weights, keys)
        for rows in (slice(0, 1), slice(7, 9), slice(19, 20)):
            assert_same(cpu.index_scores(q[rows], weights[rows], keys), whole[rows])
        assert_same(cpu.index_scores(q, weights, keys[37:41]), whole[:, 37:41])


def test_result_does_not_depend_on_threads(every_level, thread_counts, assert_same, make_query) -> None:
    case = make_query(3, 5, 64, 2000, 0)
    for _ in every_level():
        expected = cpu.index_scores(*case)
        for _ in thread_counts():
            assert_same(cpu.index_scores(*case), expected)
            assert_same(cpu.top_groups(expected, 70), indexer.top_groups.reference(expected, 70))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda b: sgl_kernel_ext.index_scores(b(2, 3, 32), b(2, 3), torch.zeros(5, 16, dtype=torch.uint8)),
         ValueError, r"keys must have shape \[5, 17\], or \[5, 64\] as bfloat16, got \[5, 16\]"),
        (lambda b: sgl_kernel_ext.index_scores(b(2, 3, 48), b(2, 3), torch.zeros(5, 25, dtype=torch.uint8)),
         ValueError, r"multiple of 32, got shape \[2, 3, 48\]"),
        (lambda b: sgl_kernel_ext.index_scores(b(2, 3, 32), b(2, 3).float(), torch.zeros(5, 17, dtype=torch.uint8)),
         TypeError, r"weights must be bfloat16, got Float of shape \[2, 3\]"),
        (lambda b: sgl_kernel_ext.index_scores_at(
            b(2, 3, 32), b(2, 3), torch.zeros(5, 17, dtype=torch.uint8), torch.tensor([0, 5])),
         IndexError, "index_scores_at: slot 5 is not in the pool of 5"),
        (lambda b: sgl_kernel_ext.index_scores_at(
            b(2, 3, 32), b(2, 3), torch.zeros(5, 17, dtype=torch.uint8), torch.zeros(3, 4, dtype=torch.int64)),
         ValueError, r"slots must be \[G\] or \[2, G\], got shape \[3, 4\]"),
        (lambda b: sgl_kernel_ext.top_groups(b(2, 3).float(), 1),
         TypeError, r"top_groups: scores must be bfloat16, got Float of shape \[2, 3\]"),
        (lambda b: sgl_kernel_ext.top_groups(b(2, 3), -1), ValueError, "k must not be negative, got -1"),
        (lambda b: sgl_kernel_ext.candidate_groups(b(2, 3), torch.tensor([3, 4]), 1, 2),
         IndexError, "row 1 sees 4 groups of 3"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_shape_and_dtype(call, error, says) -> None:
    with pytest.raises(error, match=says):
        call(lambda *shape: torch.zeros(shape, dtype=torch.bfloat16))
