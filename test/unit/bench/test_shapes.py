"""The generated traces have the figures that they state, at any scale."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.shapes import SHAPES, generate
from sglang_ced.bench.trace import Trace, ideal_hit_rate

SESSIONS = 800


@pytest.fixture(scope="module", params=[0])
def agentperf(request: pytest.FixtureRequest) -> Trace:
    return generate("agentperf", SESSIONS, seed=request.param)


@pytest.fixture(scope="module", params=[0])
def agentx(request: pytest.FixtureRequest) -> Trace:
    return generate("agentx", 150, seed=request.param)


def test_agentperf_inputs_are_1k_to_131k_with_a_mean_near_27k(agentperf: Trace) -> None:
    inputs = np.array([request.input for request in agentperf.requests])
    assert 1024 <= inputs.min() < 2048
    assert 120_000 < inputs.max() <= 131_072
    assert inputs.mean() == pytest.approx(27_000, rel=0.12)


def test_agentperf_outputs_have_a_median_near_150_and_a_95th_percentile_near_2k(agentperf: Trace) -> None:
    outputs = [request.output for request in agentperf.requests]
    assert np.median(outputs) == pytest.approx(150, rel=0.15)
    assert np.percentile(outputs, 95) == pytest.approx(2000, rel=0.15)


def test_agentperf_sessions_have_up_to_200_turns_with_tool_time_between(agentperf: Trace) -> None:
    turns = [len(requests) for requests in agentperf.sessions.values()]
    assert 150 < max(turns) <= 200
    assert np.median(turns) > 3
    assert all((request.delay_ms > 0) == (request.turn > 0) for request in agentperf.requests)


def test_agentx_prompts_are_over_80_percent_hits_and_come_from_sub_agents_too(agentx: Trace) -> None:
    assert ideal_hit_rate(agentx) > 0.8
    children = [name for name in agentx.sessions if "::sa:" in name]
    assert len(children) > 0.2 * len(agentx.sessions)
    parents = {name.split("::")[0] for name in children}
    assert parents <= set(agentx.sessions)
    assert np.median([len(turns) for turns in agentx.sessions.values()]) >= 5


def test_agentx_lengths_are_those_of_the_reference_page(agentx: Trace) -> None:
    inputs, outputs = ([getattr(request, side) for request in agentx.requests] for side in ("input", "output"))
    assert min(inputs) >= 8192
    assert max(inputs) <= 131_072
    assert np.mean(inputs) == pytest.approx(39_000, rel=0.1)
    assert np.median(outputs) == pytest.approx(155, rel=0.15)
    assert np.percentile(outputs, 95) == pytest.approx(1600, rel=0.15)


def test_one_factor_scales_lengths_and_delays_and_nothing_else() -> None:
    whole, eighth = generate("agentperf", 300, seed=3), generate("agentperf", 300, scale=1 / 8, block=8, seed=3)
    for measure in (lambda r: r.input, lambda r: r.output, lambda r: r.delay_ms):
        large, small = (np.mean([measure(request) for request in trace.requests]) for trace in (whole, eighth))
        assert small * 8 == pytest.approx(large, rel=0.03)
    turns = [[len(requests) for requests in trace.sessions.values()] for trace in (whole, eighth)]
    assert np.mean(np.array(turns[0]) == np.array(turns[1])) > 0.98  # the limit can round the other way
    assert ideal_hit_rate(eighth) == pytest.approx(ideal_hit_rate(whole), abs=0.02)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(SHAPES)), st.floats(0.002, 0.05), st.integers(0, 1 << 30), st.sampled_from([2, 16, 64])
)  # fmt: skip
def test_a_seed_gives_one_trace_and_every_turn_goes_on_from_the_one_before(
    shape: str, scale: float, seed: int, block: int
) -> None:
    trace = generate(shape, 3, scale, seed, block, max_turns=5)
    assert trace == generate(shape, 3, scale, seed, block, max_turns=5)
    for requests in trace.sessions.values():
        assert len(requests) <= 5
        for before, after in pairwise(requests):
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert after.prompt[len(before.prompt)].size == before.output
            assert after.input > before.input + before.output
    ids: dict[int, int] = {}
    for request in trace.requests:
        for piece in request.prompt:
            assert ids.setdefault(piece.id, piece.size) == piece.size  # aiperf takes one size per id only


def test_sessions_of_one_sort_share_their_system_prompt() -> None:
    trace = generate("agentx", 3, scale=1 / 16, block=64, seed=0)
    first = [turns[0].prompt for name, turns in trace.sessions.items() if "::" not in name]
    assert sum(piece.size for piece in first[0][:18]) == 18432 // 16
    assert first[0][:18] == first[1][:18] == first[2][:18]
    assert first[0][18:19] != first[1][18:19]


@pytest.mark.parametrize("argument", [{"sessions": 0}, {"scale": 0.0}, {"block": 0}, {"max_turns": -1}])
def test_an_argument_out_of_range_is_named(argument: dict[str, float]) -> None:
    with pytest.raises(BenchError, match=next(iter(argument))):
        generate("agentx", **{"sessions": 1, **argument})  # type: ignore[arg-type]
    with pytest.raises(BenchError, match="there is agentperf, agentx"):
        generate("chat", 1)
