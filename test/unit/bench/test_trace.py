"""Prompts of pieces, their tokens, and what a cache could hit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.trace import Piece, Request, TokenSource, Trace, answer_piece, prefix_hits, vocabulary
from sglang_ced.cli.models import bundled_path

pieces = st.builds(Piece, st.integers(-(1 << 40), 1 << 40), st.integers(1, 200))


@given(st.integers(-(1 << 40), 1 << 40), st.integers(1, 200), st.integers(1, 200), st.integers(0, 1 << 30))
def test_equal_ids_give_equal_tokens_whatever_the_size_and_the_order(i: int, a: int, b: int, seed: int) -> None:
    words = range(3, 250)
    first, second = TokenSource(words, seed), TokenSource(words, seed)
    tokens = first.piece(Piece(i, a)), first.piece(Piece(i, b))
    assert [len(each) for each in tokens] == [a, b]
    assert tokens == (second.piece(Piece(i, a)), second.piece(Piece(i, b)))
    shorter = min(a, b)
    assert tokens[0][:shorter] == tokens[1][:shorter]


@given(st.lists(pieces, min_size=1, max_size=8))
def test_a_prompt_has_its_length_to_the_token(prompt: list[Piece]) -> None:
    request = Request("s", 0, tuple(prompt), 1)
    assert len(TokenSource(range(3, 250)).prompt(request)) == request.input


def test_other_ids_and_seeds_give_other_tokens() -> None:
    source = TokenSource(range(1000))
    assert source.piece(Piece(1, 32)) != source.piece(Piece(2, 32))
    assert source.piece(Piece(1, 32)) != source.piece(Piece(-1, 32))
    assert source.piece(Piece(1, 32)) != TokenSource(range(1000), seed=1).piece(Piece(1, 32))


def test_tokens_are_ordinary_ones_of_the_tokenizer(tmp_path: Path) -> None:
    words = vocabulary(bundled_path("ced-toy"))
    assert not set(words.tolist()) & {0, 1, 2, 503}
    assert 250 in words
    tokens = TokenSource(words).piece(Piece(0, 20000))
    assert set(tokens) == set(words.tolist())
    with pytest.raises(BenchError, match=r"has no tokenizer\.json"):
        vocabulary(tmp_path)


@given(st.lists(st.lists(st.builds(Piece, st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=5), max_size=6))
def test_hits_are_those_that_the_tokens_themselves_give(prompts: list[list[Piece]]) -> None:
    # An id has one size, as it does in files that aiperf takes; a block's tokens differ from another's at once.
    size = {piece.id: piece.size for prompt in prompts for piece in prompt}
    requests = [Request(f"s{n}", 0, tuple(Piece(p.id, size[p.id]) for p in each), 1) for n, each in enumerate(prompts)]
    tokens = [[(p.id, k) for p in request.prompt for k in range(p.size)] for request in requests]
    expected = []
    for n, prompt in enumerate(tokens):
        common = [next((k for k, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b),
                       min(len(prompt), len(other))) for other in tokens[:n]]  # fmt: skip
        expected.append(min(max(common, default=0), len(prompt) - 1))
    assert prefix_hits(requests) == expected


def test_sessions_must_be_whole_and_in_order() -> None:
    one = Request("s", 0, (Piece(0, 1),), 1)
    with pytest.raises(BenchError, match="session 's': turn 2"):
        Trace((one, Request("s", 2, (Piece(0, 1),), 1)), 64)
    with pytest.raises(BenchError, match="empty prompt"):
        Trace((Request("s", 0, (), 1),), 64)


def test_the_digest_stands_for_every_field() -> None:
    base = Request("s", 0, (Piece(0, 4),), 3)
    others = [
        Request("t", 0, (Piece(0, 4),), 3),
        Request("s", 0, (Piece(1, 4),), 3),
        Request("s", 0, (Piece(0, 5),), 3),
        Request("s", 0, (Piece(0, 4),), 4),
        Request("s", 0, (Piece(0, 4),), 3, 1.0),
    ]
    digests = {Trace((each,), 64).digest for each in [base, *others]} | {Trace((base,), 32).digest}
    assert len(digests) == 7
    assert Trace((base,), 64).digest == Trace((base,), 64).digest


def test_answers_of_all_turns_and_sessions_differ() -> None:
    ids = {answer_piece(session, turn, 1).id for session in range(50) for turn in range(200)}
    assert len(ids) == 50 * 200
    assert max(ids) < 0
    assert np.iinfo(np.int64).min < answer_piece(1 << 40, 0, 1).id
