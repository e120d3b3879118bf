"""Faults that users of other engines have met, as properties of the ops: of the references and of the fast versions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sglang_ced.formats import Record
from sglang_ced.kernels import attention, engram, indexer, moe, norm, registry


@pytest.fixture(autouse=True, params=registry.MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    registry.activate(request.param)
    yield
    registry.activate()


def test_topk_ties_are_batch_invariant() -> None:
    """Value descending, index ascending, however many rows come along."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (33, 100), generator=generator).to(torch.bfloat16)
    together = indexer.top_groups(scores, 10)
    for row, chosen in zip(scores, together, strict=True):
        expected = sorted(sorted(range(100), key=lambda i: (-float(row[i]), i))[:10])
        assert chosen.tolist() == expected
        assert torch.equal(indexer.top_groups(row[None], 10)[0], chosen)


def test_topk_nan_scores() -> None:
    """A NaN neither enters the set nor shortens it."""
    scores = torch.tensor([[3.0, float("nan"), 1.0, 2.0, float("nan"), 0.5]]).to(torch.bfloat16)
    assert indexer.top_groups(scores, 3).tolist() == [[0, 2, 3]]
    assert indexer.top_groups(scores, 6).tolist() == [[0, 2, 3, 5, -1, -1]]


def test_fewer_positions_than_k() -> None:
    scores = torch.full((2, 5), -torch.inf, dtype=torch.bfloat16)
    scores[1, 3] = 1.0
    assert indexer.top_groups(scores, 8).tolist() == [[-1] * 5, [3, -1, -1, -1, -1]]
    assert indexer.top_groups(scores[:, :0], 8).shape == (2, 0)


def test_candidate_newest_block_pinned() -> None:
    """The newest visible block stays in, however low its scores; -inf blocks never do."""
    scores = torch.full((1, 12), -torch.inf, dtype=torch.bfloat16)
    scores[0, :8] = torch.tensor([5.0, 5, 4, 4, 3, 3, -9, -9]).to(torch.bfloat16)
    keep = indexer.candidate_groups(scores, torch.tensor([8]), blocks=2, block_size=2)
    assert keep[0].nonzero().flatten().tolist() == [0, 1, 6, 7]
    keep = indexer.candidate_groups(scores, torch.tensor([8]), blocks=6, block_size=2)
    assert keep[0].nonzero().flatten().tolist() == list(range(8))


def test_candidate_filter_is_noop_up_to_16384() -> None:
    """2048 blocks of 8 hold every group of a context of 16384."""
    scores = torch.randn(2, 16384, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert indexer.candidate_groups(scores, torch.tensor([16384, 16384]), 2048, 8).all()
    more = torch.randn(1, 16400, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert int(indexer.candidate_groups(more, torch.tensor([16400]), 2048, 8).sum()) == 16384


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_empty_row_with_sink(rows: int) -> None:
    """A row with no key at all gives zeros, not NaN."""
    q = torch.ones(rows, 2, 32, dtype=torch.bfloat16)
    window = torch.ones(3, 32, dtype=torch.bfloat16)
    out = attention.attend(q, window, None, torch.full((rows, 70), -1), torch.zeros(2))
    assert torch.equal(out, torch.zeros_like(q))


def test_a_key_in_the_window_and_in_a_group_counts_twice() -> None:
    window = torch.full((1, 32), 6.0, dtype=torch.bfloat16)  # exact in every format
    pool = Record(32, "global").encode(window)
    q = torch.zeros(1, 1, 32, dtype=torch.bfloat16)
    sink = torch.zeros(1)
    once = attention.attend(q, window, pool, torch.tensor([[0, -1]]), sink)
    twice = attention.attend(q, window, pool, torch.tensor([[0, 1]]), sink)
    assert float(once[0, 0, 0]) == pytest.approx(3)
    assert float(twice[0, 0, 0]) == pytest.approx(4)


def test_relu_in_index_scores_and_sum_not_mean() -> None:
    keys = Record(32, "index").encode(torch.tensor([[1.0] * 32, [-1.0] * 32]).to(torch.bfloat16))
    q = torch.ones(1, 3, 32, dtype=torch.bfloat16)
    weights = torch.tensor([[1.0, 1.0, -0.5]]).to(torch.bfloat16)
    assert indexer.index_scores(q, weights, keys).tolist() == [[48.0, 0.0]]


def test_router_underflow() -> None:
    """Very negative logits: the weights stay finite and equal, no 0 / 0."""
    x, weight = torch.full((2, 32), -50.0, dtype=torch.bfloat16), torch.ones(6, 32, dtype=torch.bfloat16)
    ids, weights = moe.route(x, weight, torch.zeros(6), 6, 1.5)
    assert weights.isfinite().all()
    assert sorted(ids[0].tolist()) == list(range(6))
    assert (weights >= 0).all()


def test_router_bias_chooses_and_does_not_weigh() -> None:
    x, weight = torch.ones(1, 32, dtype=torch.bfloat16), torch.zeros(4, 32, dtype=torch.bfloat16)
    ids, weights = moe.route(x, weight, torch.tensor([0.0, 9.0, 0.0, 5.0]), 2, 1.5)
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.75, 0.75]]


def test_norm_eps_of_1e_20() -> None:
    weight = torch.ones(64, dtype=torch.bfloat16)
    assert not norm.rms_norm(torch.zeros(2, 64, dtype=torch.bfloat16), weight, 1e-20).any()
    tiny = torch.full((1, 64), 1e-8).to(torch.bfloat16)
    assert torch.equal(norm.rms_norm(tiny, weight, 1e-20), torch.ones(1, 64, dtype=torch.bfloat16))


def test_a_blocked_token_blocks_all_older_ones() -> None:
    """Latching pad: behind an image token or the start of the text, everything counts as pad."""
    constants = ([3, 5, 7], [[11], [13]], [0, 11])
    latched = engram.ngram_rows(torch.tensor([[4, -1, 6]]), 2, *constants)
    assert torch.equal(latched, engram.ngram_rows(torch.tensor([[4, 2, 2]]), 2, *constants))
    assert not torch.equal(latched, engram.ngram_rows(torch.tensor([[4, 2, 6]]), 2, *constants))
