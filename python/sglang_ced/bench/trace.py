"""A trace: what agents ask, in tokens, without the tokens.

A prompt is a sequence of pieces. A piece has an id and a size, and its id decides its tokens: equal ids give equal
tokens, in whichever prompt they stand and on whichever machine. Files say which pieces prompts share; `TokenSource`
fills them in for one tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_ced.bench.errors import BenchError

# Answers are pieces too, which no file names: theirs are the negative ids. More turns than this are refused.
TURNS = 1 << 20


class Piece(NamedTuple):
    """`size` tokens, the first of the endless stream that `id` stands for."""

    id: int
    size: int


@dataclass(frozen=True)
class Request:
    """One request of an agent.

    prompt: all of the input, the turns before included. output: tokens to generate. delay_ms: from the end of the
    turn before to this request: the time the agent's tools took.
    """

    session: str
    turn: int
    prompt: tuple[Piece, ...]
    output: int
    delay_ms: float = 0.0

    @property
    def input(self) -> int:
        """Tokens of the prompt."""
        return sum(piece.size for piece in self.prompt)


@dataclass(frozen=True)
class Trace:
    """Requests, those of a session in a row and in order. block: tokens of a piece that a prompt can share."""

    requests: tuple[Request, ...]
    block: int

    def __post_init__(self) -> None:
        turns: dict[str, int] = {}
        for request in self.requests:
            if request.turn != turns.get(request.session, 0):
                raise BenchError(f"session {request.session!r}: turn {request.turn} follows {turns[request.session]}")
            turns[request.session] = request.turn + 1
            if not request.prompt or request.output < 1 or any(piece.size < 1 for piece in request.prompt):
                raise BenchError(f"session {request.session!r}, turn {request.turn}: an empty prompt or answer")

    @property
    def sessions(self) -> dict[str, list[Request]]:
        """Requests by session, in order of appearance."""
        out: dict[str, list[Request]] = {}
        for request in self.requests:
            out.setdefault(request.session, []).append(request)
        return out

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits that stand for all of the trace."""
        rows = [[r.session, r.turn, r.prompt, r.output, r.delay_ms] for r in self.requests]
        return hashlib.sha256(json.dumps([self.block, rows]).encode()).hexdigest()[:12]


def answer_piece(session: int, turn: int, size: int) -> Piece:
    """The answer to a turn of the session of that index, as it stands in the prompts that follow.

    The recorded answer stands there, not the one that the server gives: so every run asks for the same tokens.
    """
    if turn >= TURNS:
        raise BenchError(f"a session of more than {TURNS} turns")
    return Piece(-(session * TURNS + turn + 1), size)


# -- what a cache could do --------------------------------------------------------------------------------------------


class _Node:
    """One piece of the prompts seen, with those that followed it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.next: dict[int, _Node] = {}


def prefix_hits(requests: Iterable[Request]) -> list[int]:
    """Of each prompt, the leading tokens that a prompt before it had: what a cache that forgets nothing would hit.

    One token of a prompt is always computed, as its output is wanted.
    """
    root, hits = _Node(0), []
    for request in requests:
        node, hit, known = root, 0, True
        for piece in request.prompt:
            after = node.next.get(piece.id)
            if after is None:
                after, known = node.next.setdefault(piece.id, _Node(piece.size)), False
            elif known:
                hit += min(after.size, piece.size)
                known = after.size == piece.size
            after.size = max(after.size, piece.size)
            node = after
        hits.append(min(hit, request.input - 1))
    return hits


def ideal_hit_rate(trace: Trace) -> float:
    """Share of all input tokens that a cache that forgets nothing would hit, requests taken in the trace's order."""
    return sum(prefix_hits(trace.requests)) / sum(request.input for request in trace.requests)


# -- tokens -----------------------------------------------------------------------------------------------------------


def vocabulary(model: Path) -> NDArray[np.int64]:
    """Ids of the ordinary tokens of a checkpoint directory's tokenizer: all but the special ones.

    Raises BenchError if there is no tokenizer.json.
    """
    from tokenizers import Tokenizer

    file = model / "tokenizer.json"
    if not file.is_file():
        raise BenchError(f"{model} has no tokenizer.json: name the directory of the checkpoint that is served")
    tokenizer = Tokenizer.from_file(str(file))
    special = set(tokenizer.get_added_tokens_decoder())
    return np.array(sorted(set(tokenizer.get_vocab().values()) - special), np.int64)


class TokenSource:
    """Tokens of pieces, drawn uniformly from `vocabulary`; the same for the same seed, id and vocabulary."""

    def __init__(self, vocabulary: Sequence[int] | NDArray[np.int64], seed: int = 0) -> None:
        self._vocabulary, self._seed = np.asarray(vocabulary, np.int64), seed
        self._streams: dict[int, list[int]] = {}

    def piece(self, piece: Piece) -> list[int]:
        """Its tokens. A longer piece of the same id begins with them."""
        known = self._streams.get(piece.id, [])
        if len(known) < piece.size:
            key = np.array([self._seed, piece.id], np.int64).view(np.uint64)
            draws = np.random.Generator(np.random.Philox(key=key)).random(piece.size)
            known = self._vocabulary[(draws * len(self._vocabulary)).astype(np.int64)].tolist()
            self._streams[piece.id] = known
        return known[: piece.size]

    def prompt(self, request: Request) -> list[int]:
        """Tokens of a prompt."""
        return [token for piece in request.prompt for token in self.piece(piece)]

    def prompts(self, trace: Trace) -> Iterator[list[int]]:
        """Tokens of every prompt, in order."""
        return (self.prompt(request) for request in trace.requests)
