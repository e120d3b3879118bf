"""The three forms of traces: what they say is kept, and what they cannot say is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.mooncake import read_mooncake, write_mooncake
from sglang_ced.bench.read import read_trace
from sglang_ced.bench.shapes import SHAPES, generate
from sglang_ced.bench.trace import Piece, Request, TokenSource, Trace, prefix_hits
from sglang_ced.cli.models import bundled_path


def lines(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


# -- Mooncake ---------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(SHAPES)), st.floats(0.002, 0.03), st.integers(0, 1 << 20), st.sampled_from([8, 64]))
def test_a_written_trace_reads_back_equal(tmp_path: Path, shape: str, scale: float, seed: int, block: int) -> None:
    trace = generate(shape, 3, scale, seed, block, max_turns=6)
    write_mooncake(trace, tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl") == trace


def test_a_written_row_has_what_its_turn_adds(tmp_path: Path) -> None:
    write_mooncake(generate("agentperf", 2, 0.05, block=16, seed=5, max_turns=3), tmp_path / "t.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    for row in rows:
        assert -(-row["input_length"] // 16) == len(row["hash_ids"])  # the layout that aiperf asks for
    later = [row for row in rows if "delay" in row]
    assert len(later) == len(rows) - 2
    assert {row["session_id"] for row in rows} == {"s0", "s1"}


def test_single_requests_share_blocks_by_hash_id(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "t.jsonl",
        {"timestamp": 0, "input_length": 1300, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 9, "input_length": 1536, "output_length": 6, "hash_ids": [1, 2, 4]},
    )
    trace = read_trace(file)
    assert trace.block == 512
    assert [request.input for request in trace.requests] == [1300, 1536]
    assert prefix_hits(trace.requests) == [0, 1024]
    first, second = TokenSource(range(100, 400)).prompts(trace)
    assert first[:1024] == second[:1024]
    assert first[1024:1300] != second[1024:1300]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_length": 10, "output_length": 1}], "t.jsonl:1: no hash_ids"),
        ([{"input_length": 60, "output_length": 1, "hash_ids": [0]}], "64 or 128 .* give --block"),
        ([{"input_length": 600, "output_length": 1, "hash_ids": [0], "block_size": 512}], "do not end in the last"),
        ([{"input_length": 5, "output_length": 1, "hash_ids": [0], "block_size": n} for n in (8, 16)], "one file"),
    ],
)
def test_a_mooncake_file_that_cannot_be_read_is_told(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        read_mooncake(lines(tmp_path / "t.jsonl", *rows))


def test_mooncake_cannot_say_that_a_turn_forgets(tmp_path: Path) -> None:
    trace = Trace((Request("s", 0, (Piece(0, 4),), 1), Request("s", 1, (Piece(1, 4),), 1)), 4)
    with pytest.raises(BenchError, match="session 's', turn 1"):
        write_mooncake(trace, tmp_path / "t.jsonl")


# -- AgentX -----------------------------------------------------------------------------------------------------------


def weka(name: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local", "requests": requests}


def call(t: float, tokens: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "s", "model": "m", "in": tokens, "out": 7, "hash_ids": ids, **more}


def test_agentx_sessions_and_sub_agents(tmp_path: Path) -> None:
    inner = [call(0.0, 64, [9], api_time=1.0), call(3.0, 100, [9])]
    agent = {"t": 1.0, "type": "subagent", "agent_id": "a", "subagent_type": "x", "status": "completed"}
    trace = read_trace(
        lines(
            tmp_path / "t.jsonl",
            weka("one", [call(0, 130, [1, 2]), agent | {"requests": inner}, call(5, 200, [1, 2, 3], think_time=0.25)]),
            weka("two", [call(0, 100, [1, 2])]),
        )
    )
    assert trace.block == 64
    assert [(r.session, r.turn, r.input, r.delay_ms) for r in trace.requests] == [
        ("one", 0, 130, 0.0),
        ("one", 1, 200, 250.0),
        ("one::sa:0", 0, 64, 0.0),
        ("one::sa:0", 1, 100, 2000.0),
        ("two", 0, 100, 0.0),
    ]
    # 128 of 130 tokens are in blocks; ids mean something else in the other session.
    assert prefix_hits(trace.requests) == [0, 128, 0, 64, 0]
    assert [piece.size for piece in trace.requests[-1].prompt] == [64, 36]


def test_agentx_reads_a_directory_and_names_what_is_wrong(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(weka(name, [call(0, 64, [1])]), indent=1))
    assert list(read_trace(tmp_path).sessions) == ["a", "b"]
    (tmp_path / "c.json").write_text(json.dumps(weka("c", [{"t": 0, "type": "s", "in": 4}])))
    with pytest.raises(BenchError, match=r"c.json, object 1: .*'out'"):
        read_trace(tmp_path)
    with pytest.raises(BenchError, match="only local"):
        read_trace(lines(tmp_path / "g.jsonl", weka("g", []) | {"hash_id_scope": "global"}))


# -- SGLang's agentic-trace -------------------------------------------------------------------------------------------


def conversations(counts: list[int | None]) -> dict[str, Any]:
    system = {"role": "system", "content": "You are a helpful agent with tools."}
    turns = [
        {"messages": [system, {"role": "user", "content": "Mend the test."}]},
        {"messages": [{"role": "user", "content": "It fails: assert 1 == 2."}]},
    ]
    for turn, count in zip(turns, counts, strict=True):
        if count is not None:
            turn["prompt_tokens"] = count
    return {"metadata": {}, "conversations": [turns, turns[:1]]}


def test_agentic_traces_take_their_lengths_from_prompt_tokens(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(conversations([100, 400])))
    trace = read_trace(tmp_path / "t.json")
    assert [(r.session, r.turn, r.input, r.output) for r in trace.requests] == [
        ("c0", 0, 100, 220),
        ("c0", 1, 400, 220),
        ("c1", 0, 100, 220),
    ]
    assert prefix_hits(trace.requests) == [0, 100, 99]


def test_agentic_traces_without_prompt_tokens_are_counted_by_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(conversations([None, None])))
    with pytest.raises(BenchError, match="turn 0: no prompt_tokens: give --model"):
        read_trace(tmp_path / "t.json")
    trace = read_trace(tmp_path / "t.json", model=bundled_path("ced-toy"))
    first, second, third = trace.requests
    assert second.input > first.input + first.output
    assert third.prompt == first.prompt


def test_a_file_of_no_form_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("hello\n")
    with pytest.raises(BenchError, match="name the form with --form"):
        read_trace(tmp_path / "t.txt")
    with pytest.raises(BenchError, match="no trace at"):
        read_trace(tmp_path / "absent")
