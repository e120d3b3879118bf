"""Figures of runs, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sglang_ced.bench.records import Record, Run
from sglang_ced.bench.summary import agentx, answer, curves, share, speed, ttft_by_context

MakeRun = Callable[..., Run]


def record(ttft: float, e2e: float, tokens: int, output: int, cached: int | None = 0) -> Record:
    return Record("s", 0, 0.0, ttft, e2e, tokens, output, cached, None)


def test_a_point_has_the_figures_worked_out_by_hand(make_run: MakeRun) -> None:
    (curve,) = curves([make_run()])
    point = curve.at(1)
    assert point.speed == pytest.approx((4 + 8) / (2.0 + 2.0))
    assert point.throughput == pytest.approx(14 / 7)
    assert point.total_throughput == pytest.approx(414 / 7)
    assert point.ttft_p50 == pytest.approx(0.75)
    assert point.agentx == pytest.approx(1 / (2.5 / 9 + 0.9 * (3 / 5 - 2.5 / 9)))
    assert point.hit_rate == pytest.approx(100 / 400)
    assert point.replay_share == pytest.approx(16 / 400)
    assert (point.peak_rss, point.kv_per_token, point.repeats, point.spread) == (2.0**30, 80.0, 1, 0.0)


def test_answers_of_one_token_have_no_speed() -> None:
    assert speed([record(1.0, 1.0, 10, 1)]) == 0.0
    assert speed([record(1.0, 1.0, 10, 1), record(1.0, 2.0, 10, 5)]) == pytest.approx(4.0)


def test_the_agentx_measure_is_that_of_the_slowest_tenth() -> None:
    records = [record(0.1, 1.0, 10, 10)] * 8 + [record(0.1, 10.0, 10, 10)] * 2
    assert agentx(records) == pytest.approx(1.0)
    assert agentx(records[:8]) == pytest.approx(10.0)


def test_a_share_is_unknown_if_one_record_does_not_know() -> None:
    assert share([record(1, 2, 100, 1, 50), record(1, 2, 300, 1, 150)], "cached") == pytest.approx(0.5)
    assert share([record(1, 2, 100, 1, 50), record(1, 2, 100, 1, None)], "cached") is None


def test_repeats_give_medians_and_spread(make_run: MakeRun) -> None:
    (curve,) = curves([make_run(repeat=k, seconds=seconds) for k, seconds in enumerate((7.0, 14.0, 3.5))])
    assert curve.at(1).throughput == pytest.approx(2.0)
    assert curve.at(1).spread == pytest.approx((4 - 1) / 2)
    assert curve.at(1).repeats == 3


def test_the_operating_point_is_the_most_throughput_that_meets_the_targets(make_run: MakeRun) -> None:
    def run(agents: int, each: float, seconds: float, ttft: float) -> Run:
        return make_run(agents=agents, seconds=seconds, records=[record(ttft, ttft + 10 / each, 50, 11)])

    (curve,) = curves([run(4, 2.0, 2.0, 9.0), run(1, 8.0, 8.0, 1.0), run(2, 5.0, 4.0, 2.0)])
    assert [point.agents for point in curve.points] == [1, 2, 4]

    def chosen(**targets: float) -> int | None:
        point = curve.operating_point(**targets)
        return None if point is None else point.agents

    assert chosen() == 4
    assert chosen(speed=5.0) == 2
    assert chosen(speed=5.1) == 1
    assert chosen(speed=9.0) is None
    assert chosen(speed=1.0, ttft=2.0) == 2
    assert answer(curve, 5.0, None).startswith("on: 2 agents, with at least 5 tok/s each: 5 tok/s each, 2.75 tok/s")
    assert "4 agents, the most that was measured" in answer(curve, 1.0, None)
    assert "no measured number of agents has at least 9 tok/s each; nearest: 1 at 8" in answer(curve, 9.0, None)


def test_time_to_the_first_token_by_octave_of_the_prompt() -> None:
    records = [record(ttft, 9, tokens, 1) for ttft, tokens in ((1, 64), (3, 127), (2, 100), (8, 128))]
    assert ttft_by_context(records) == [(64, 128, 2.0, 3), (128, 256, 8.0, 1)]
