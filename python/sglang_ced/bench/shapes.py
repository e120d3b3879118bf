"""Seeded traces of two shapes of agent traffic. `scale` multiplies every length and every delay, and nothing else.

The figures are those of a model that is served at full size. A small machine takes the same shape at a scale at which
it gets through: sharing, turns and the relation of input to output stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.trace import Piece, Request, Trace, answer_piece

P95 = 1.6448536269514722  # of a standard normal distribution


@dataclass(frozen=True)
class LogNormal:
    """Positive numbers by median and 95th percentile, cut to [low, high]."""

    median: float
    p95: float
    low: float
    high: float

    def draw(self, rng: np.random.Generator, session: float = 0.0) -> float:
        """One number. session: a standard normal value that accounts for half of the variance, if it is not 0."""
        sigma, z = math.log(self.p95 / self.median) / P95, rng.standard_normal()
        z = (z + session) / math.sqrt(2) if session else z
        return float(np.clip(self.median * math.exp(sigma * z), self.low, self.high))


@dataclass(frozen=True)
class Agent:
    """One sort of session, in tokens and seconds. Sessions differ: one with long answers has long tool results too.

    shared: system prompt and tools, which all sessions of this sort begin with. first: the first prompt, `shared`
    included. growth: what a turn adds besides the answer before it: tool results. limit: a session ends before a
    prompt of more tokens than this.
    """

    shared: int
    first: LogNormal
    growth: LogNormal
    output: LogNormal
    turns: LogNormal
    tool_seconds: LogNormal
    limit: int


@dataclass(frozen=True)
class Shape:
    """Sessions of one sort, which start a sub-agent beside a turn with probability `spawn`."""

    agent: Agent
    subagent: Agent | None = None
    spawn: float = 0.0


# What is drawn is not what a trace shows: long sessions count more, and their answers are shorter than the median. The
# numbers are such that traces of many sessions show what test_shapes.py states: agentperf, inputs of 1K to 131K with a
# mean near 27K, outputs with median near 150 and 95th percentile near 2K, up to 200 turns.
SHAPES = {
    "agentperf": Shape(
        Agent(
            shared=1024,
            first=LogNormal(1500, 13000, 1024, 131072),
            growth=LogNormal(180, 2000, 16, 65536),
            output=LogNormal(185, 2600, 1, 32768),
            turns=LogNormal(7, 90, 1, 200),
            tool_seconds=LogNormal(1.5, 30, 0.05, 600),
            limit=131072,
        )
    ),
    "agentx": Shape(
        Agent(
            shared=18432,
            first=LogNormal(20500, 30000, 18944, 131072),
            growth=LogNormal(450, 4000, 16, 32768),
            output=LogNormal(220, 2400, 1, 32768),
            turns=LogNormal(20, 100, 2, 200),
            tool_seconds=LogNormal(2, 40, 0.05, 600),
            limit=131072,
        ),
        subagent=Agent(
            shared=8192,
            first=LogNormal(8900, 11000, 8448, 32768),
            growth=LogNormal(700, 5000, 16, 32768),
            output=LogNormal(120, 1200, 1, 8192),
            turns=LogNormal(7, 25, 1, 60),
            tool_seconds=LogNormal(1, 10, 0.05, 120),
            limit=65536,
        ),
        spawn=0.04,
    ),
}


def generate(
    shape: str, sessions: int, scale: float = 1.0, seed: int = 0, block: int = 64, max_turns: int | None = None
) -> Trace:
    """A trace of that many sessions, and of the sub-agents that they start, each of which is a session of its own.

    block: tokens of a block that prompts can share. max_turns: sessions are cut after so many, which shortens prompts.
    Raises BenchError, naming the argument, if one is out of range.
    """
    if shape not in SHAPES:
        raise BenchError(f"shape {shape!r}: there is {', '.join(SHAPES)}")
    for name, value in (("sessions", sessions), ("scale", scale), ("block", block), ("max_turns", max_turns or 1)):
        if not value > 0:
            raise BenchError(f"{name} {value}: must be above 0")
    return _Generator(SHAPES[shape], scale, seed, block, max_turns).trace(sessions)


class _Generator:
    def __init__(self, shape: Shape, scale: float, seed: int, block: int, max_turns: int | None) -> None:
        self.shape, self.scale, self.block, self.max_turns = shape, scale, block, max_turns
        self.rng = np.random.default_rng(seed)
        self.requests: list[Request] = []
        self.started = 0
        self.next_id = 0
        # Sessions of one sort share these blocks. A block is shared whole or not at all.
        self.shared = {agent: self._blocks(self._shared(agent)) for agent in (shape.agent, shape.subagent) if agent}

    def trace(self, sessions: int) -> Trace:
        for number in range(sessions):
            turns = self._session(f"s{number}", self.shape.agent)
            if self.shape.subagent is not None:
                for child in range(int(self.rng.binomial(turns, self.shape.spawn))):
                    self._session(f"s{number}::sa:{child}", self.shape.subagent)
        return Trace(tuple(self.requests), self.block)

    def _session(self, name: str, agent: Agent) -> int:
        """Add a session; how many turns it has."""
        index, self.started = self.started, self.started + 1
        wanted, terse = round(agent.turns.draw(self.rng)), self.rng.standard_normal()
        wanted = wanted if self.max_turns is None else min(wanted, self.max_turns)
        limit = max(1, round(agent.limit * self.scale))
        shared = self.shared[agent]
        own = max(1, min(self._tokens(agent.first), limit) - sum(piece.size for piece in shared))
        prompt = (*shared, *self._blocks(own))
        for turn in range(wanted):
            output, delay = self._tokens(agent.output, terse), 1e3 * self.scale * agent.tool_seconds.draw(self.rng)
            self.requests.append(Request(name, turn, prompt, output, round(delay, 3) if turn else 0.0))
            prompt = (*prompt, answer_piece(index, turn, output), *self._blocks(self._tokens(agent.growth, terse)))
            if sum(piece.size for piece in prompt) > limit:
                return turn + 1
        return wanted

    def _tokens(self, length: LogNormal, session: float = 0.0) -> int:
        return max(1, round(self.scale * length.draw(self.rng, session)))

    def _shared(self, agent: Agent) -> int:
        return round(agent.shared * self.scale) // self.block * self.block

    def _blocks(self, tokens: int) -> tuple[Piece, ...]:
        """Blocks that nothing has had so far; the last holds what is left."""
        sizes = [self.block] * (tokens // self.block) + ([tokens % self.block] if tokens % self.block else [])
        first, self.next_id = self.next_id, self.next_id + len(sizes)
        return tuple(Piece(first + i, size) for i, size in enumerate(sizes))
