"""Runs on disk and their report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.records import Record, Run, load_runs, read_aiperf
from sglang_ced.bench.replay import with_replay
from sglang_ced.bench.report import write_report
from sglang_ced.bench.trace import Piece, Request, Trace
from sglang_ced.cli.models import bundled_path
from sglang_ced.config import CedConfig

MakeRun = Callable[..., Run]


def test_a_saved_run_loads_equal_and_half_a_run_is_none(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    for place in ("a/agents-1", "b/agents-1"):
        (tmp_path / place).mkdir(parents=True)
        run.save(tmp_path / place)
    assert load_runs([tmp_path]) == [run, run]
    (tmp_path / "b/agents-1/run.json").unlink()
    assert load_runs([tmp_path]) == [run]
    with pytest.raises(BenchError, match="no finished run"):
        load_runs([tmp_path / "b"])


# -- what aiperf leaves -----------------------------------------------------------------------------------------------

TRACE = Trace((Request("s", 0, (Piece(0, 8),), 2), Request("s", 1, (Piece(0, 8), Piece(1, 4)), 3)), 8)


def row(turn: int, tokens: int, output: int, **more: Any) -> dict[str, Any]:
    metadata = {"conversation_id": "s", "turn_index": turn, "request_start_ns": 10**9 * (turn + 5)}
    values = {
        "time_to_first_token": 250.0,
        "request_latency": 1250.0,
        "usage_prompt_tokens": tokens,
        "usage_completion_tokens": output,
        "usage_prompt_cache_read_tokens": 4 * turn,
    }
    return {"metadata": metadata, "metrics": {name: {"value": value} for name, value in values.items()}} | more


def left(directory: Path, *rows: dict[str, Any]) -> Path:
    (directory / "profile_export.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_records_are_in_the_order_of_the_trace_and_in_seconds(tmp_path: Path) -> None:
    records = read_aiperf(left(tmp_path, row(1, 12, 3), row(0, 8, 2)), TRACE)
    assert records == [Record("s", 0, 0.0, 0.25, 1.25, 8, 2, 0, None), Record("s", 1, 1.0, 0.25, 1.25, 12, 3, 4, None)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(0, 8, 2)], "has 1 requests, the trace 2"),
        ([row(0, 8, 2), row(1, 12, 3), row(1, 12, 3)], "has 3 requests"),
        ([row(0, 8, 2), row(1, 13, 3)], "turn 1: 13 tokens in and 3 out, and not 12 and 3"),
        ([row(0, 8, 2), row(1, 12, 2)], "12 tokens in and 2 out"),
        ([row(0, 8, 2), row(1, 12, 3, error={"message": "broken"})], "1 of 2 requests failed.*broken"),
        ([row(0, 8, 2), row(1, 12, 3, metrics={})], "turn 1: no 'time_to_first_token'"),
    ],
)
def test_a_replay_that_is_not_the_trace_is_told(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        read_aiperf(left(tmp_path, *rows), TRACE)


def test_a_chat_template_may_add_a_few_tokens_and_take_none(tmp_path: Path) -> None:
    left(tmp_path, row(0, 12, 2), row(1, 16, 3))
    assert [record.input for record in read_aiperf(tmp_path, TRACE, template=4)] == [12, 16]
    with pytest.raises(BenchError):
        read_aiperf(tmp_path, TRACE, template=3)
    with pytest.raises(BenchError):
        read_aiperf(left(tmp_path, row(0, 7, 2), row(1, 12, 3)), TRACE, template=4)


def test_replayed_rows_are_those_of_the_plan() -> None:
    config = CedConfig.from_dir(bundled_path("ced-toy"))
    hit = Record("s", 0, 0.0, 1.0, 1.0, 500, 1, 256, None)
    cold, unknown = (Record("s", 0, 0.0, 1.0, 1.0, 500, 1, cached, None) for cached in (0, None))
    bounded = [record.replayed for record in with_replay([hit, cold, unknown], "bounded", config)]
    assert bounded == [config.sliding_window, 0, None]
    (exact,) = with_replay([hit], "exact", config)
    assert exact.replayed == min(256, config.num_hidden_layers * (config.sliding_window - 1))


# -- the report -------------------------------------------------------------------------------------------------------


def test_a_report_has_page_figures_summary_and_every_request(make_run: MakeRun, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    slow = make_run("off", seconds=70.0, arguments=["--ced-kernels", "reference"])
    text = write_report([slow, make_run(), make_run(agents=2, memory={})], tmp_path, target_speed=2.0)
    assert "off: 1 agent, the most that was measured, with at least 2 tok/s each" in text
    requests = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(requests) == 6
    expected = {
        "name",
        "agents",
        "repeat",
        "session",
        "turn",
        "start",
        "ttft",
        "e2e",
        "input",
        "output",
        "cached",
        "replayed",
    }
    assert requests[0].keys() == expected
    page = (tmp_path / "report.html").read_text()
    pictures = sorted(file.name for file in tmp_path.glob("*.png"))
    assert pictures == ["agentx.png", "hits.png", "memory.png", "throughput.png", "ttft.png"]
    assert page.count("data:image/png;base64,") == len(pictures)
    for said in ("--ced-kernels reference", "2 threads", "with at least 2 tok/s each"):
        assert said in page
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [len(curve["points"]) for curve in summary["curves"].values()] == [1, 2]
