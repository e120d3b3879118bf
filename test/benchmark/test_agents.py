"""The headline figures of `make bench-agents`, from runs made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from benchmark.agents.run import headline

from sglang_ced.bench.records import Record, Run
from sglang_ced.bench.summary import Curve, curves


def run(name: str, agents: int, per_token: float, seconds: float, cached: int = 0) -> Run:
    """One answer of 11 tokens."""
    record = Record("s", 0, 0.0, 1.0, 1.0 + 10 * per_token, 100, 11, cached, None)
    more: dict[str, Any] = {"arguments": [], "trace": {}, "conditions": {}, "counters": {}, "memory": {}, "key": {}}
    return Run(name=name, agents=agents, repeat=0, seconds=seconds, records=[record], **more)


def routed() -> list[Curve]:
    return curves([run("cache_aware", 3, 0.1, 1.0, 60), run("round_robin", 3, 0.1, 1.0, 30)])


def test_throughput_is_that_of_the_agents_who_are_as_fast_as_one_with_all_off() -> None:
    off = run("all_off", 1, 2.0, 22.0)
    on = [run("all_on", 1, 0.5, 11.0), run("all_on", 2, 1.0, 5.5), run("all_on", 4, 3.0, 2.2)]
    result = headline(curves([off, *on]), routed())
    assert result["decode_c1_x"] == pytest.approx(4.0)
    assert result["throughput_at_equal_speed_x"] == pytest.approx(4.0)
    assert result["agents_at_equal_speed"] == 2
    assert (result["hit_rate_affinity"], result["hit_rate_round_robin"]) == (pytest.approx(0.6), pytest.approx(0.3))


def test_no_equal_speed_is_said_by_zero() -> None:
    result = headline(curves([run("all_off", 1, 1.0, 11.0), run("all_on", 1, 2.0, 22.0)]), routed())
    assert (result["decode_c1_x"], result["throughput_at_equal_speed_x"]) == (pytest.approx(0.5), 0.0)


def test_a_trace_without_speeds_is_told() -> None:
    silent = run("all_off", 1, 1.0, 11.0)
    silent.records[:] = [Record("s", 0, 0.0, 1.0, 1.0, 100, 1, 0, None)]
    with pytest.raises(SystemExit, match="larger --scale"):
        headline(curves([silent, run("all_on", 1, 1.0, 11.0)]), routed())
