"""Figures of runs: a point for each number of agents, curves of points, and the answer to how many agents."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_ced.bench.records import Record, Run


@dataclass(frozen=True)
class Point:
    """One number of agents of one configuration; each figure is the median over repeats.

    speed: tokens per second of one agent while its answer comes, first token excluded. throughput: output tokens per
    second of all agents; total_throughput: input tokens too. ttft_p50, ttft_p90: seconds. agentx: 1 / p90 of end-to-end
    seconds per output token. hit_rate, replay_share: cached and replayed tokens over input tokens, None if not known.
    spread: of throughput, largest less smallest over the median; 0 for one repeat.
    """

    agents: int
    speed: float
    throughput: float
    total_throughput: float
    ttft_p50: float
    ttft_p90: float
    agentx: float
    hit_rate: float | None
    replay_share: float | None
    peak_rss: float | None
    kv_per_token: float | None
    repeats: int
    spread: float


@dataclass(frozen=True)
class Curve:
    """Points of one configuration, by rising number of agents, and the last of its runs, which says its conditions."""

    name: str
    points: tuple[Point, ...]
    run: Run

    def at(self, agents: int) -> Point:
        return next(point for point in self.points if point.agents == agents)

    def operating_point(self, speed: float | None = None, ttft: float | None = None) -> Point | None:
        """The measured point of most throughput with at least `speed` tokens/s for each agent and a median time to the
        first token of at most `ttft` seconds. Nothing is interpolated."""
        fit = [
            point
            for point in self.points
            if (speed is None or point.speed >= speed) and (ttft is None or point.ttft_p50 <= ttft)
        ]
        return max(fit, key=lambda point: point.throughput, default=None)


def speed(records: Iterable[Record]) -> float:
    """Tokens after the first over the time they took, of all requests together; 0 if no answer has two."""
    pairs = [(record.output - 1, record.e2e - record.ttft) for record in records if record.output > 1]
    tokens, seconds = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0, 0.0)
    return tokens / seconds if seconds > 0 else 0.0


def agentx(records: Sequence[Record]) -> float:
    """1 / p90(end-to-end latency / output tokens), in tokens per second."""
    return 1.0 / float(np.percentile([record.e2e / record.output for record in records], 90))


def share(records: Sequence[Record], field: str) -> float | None:
    """The field's tokens over input tokens; None if a record does not know it."""
    values = [getattr(record, field) for record in records]
    return None if None in values else float(sum(values) / sum(record.input for record in records))


def curves(runs: Sequence[Run]) -> list[Curve]:
    """One for each configuration, in order of appearance."""
    names = dict.fromkeys(run.name for run in runs)
    return [_curve(name, [run for run in runs if run.name == name]) for name in names]


def _curve(name: str, runs: list[Run]) -> Curve:
    numbers = sorted({run.agents for run in runs})
    return Curve(name, tuple(_point(n, [run for run in runs if run.agents == n]) for n in numbers), runs[-1])


def _point(agents: int, runs: list[Run]) -> Point:
    def median(values: list[float]) -> float:
        return float(statistics.median(values))

    def known(values: list[float | None]) -> float | None:
        there = [value for value in values if value is not None]
        return median(there) if there else None

    throughputs = [sum(record.output for record in run.records) / run.seconds for run in runs]
    ttfts = [[record.ttft for record in run.records] for run in runs]
    return Point(
        agents=agents,
        speed=median([speed(run.records) for run in runs]),
        throughput=median(throughputs),
        total_throughput=median([sum(r.output + r.input for r in run.records) / run.seconds for run in runs]),
        ttft_p50=median([float(np.percentile(each, 50)) for each in ttfts]),
        ttft_p90=median([float(np.percentile(each, 90)) for each in ttfts]),
        agentx=median([agentx(run.records) for run in runs]),
        hit_rate=known([share(run.records, "cached") for run in runs]),
        replay_share=known([share(run.records, "replayed") for run in runs]),
        peak_rss=known([run.memory.get("peak_rss") for run in runs]),
        kv_per_token=known([run.memory.get("kv_per_token") for run in runs]),
        repeats=len(runs),
        spread=(max(throughputs) - min(throughputs)) / median(throughputs),
    )


def answer(curve: Curve, speed: float | None, ttft: float | None) -> str:
    """One sentence: how many agents, at what speed each."""
    wanted = " and ".join(
        ([f"at least {speed:.4g} tok/s each"] if speed is not None else [])
        + ([f"a first token within {ttft:g} s (median)"] if ttft is not None else [])
    )
    point = curve.operating_point(speed, ttft)
    if point is None:
        best = max(curve.points, key=lambda each: each.speed)
        return (
            f"{curve.name}: no measured number of agents has {wanted}; nearest: {best.agents} at {best.speed:.3g} "
            f"tok/s each, first token {best.ttft_p50:.3g} s"
        )
    more = "" if point is not curve.points[-1] else ", the most that was measured"
    return (
        f"{curve.name}: {point.agents} agent{'s' * (point.agents != 1)}{more}, with {wanted}: {point.speed:.3g} tok/s "
        f"each, {point.throughput:.3g} tok/s together, first token {point.ttft_p50:.3g} s"
    )


def ttft_by_context(records: Iterable[Record]) -> list[tuple[int, int, float, int]]:
    """Of each octave of prompt lengths that occurs: from, to (exclusive), median time to the first token, requests."""
    octaves: dict[int, list[float]] = {}
    for record in records:
        octaves.setdefault(record.input.bit_length() - 1, []).append(record.ttft)
    return [(1 << k, 2 << k, float(statistics.median(times)), len(times)) for k, times in sorted(octaves.items())]
