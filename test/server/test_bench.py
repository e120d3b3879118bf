"""`ced bench` end to end: a real server, the real aiperf."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ced.bench.mooncake import write_mooncake
from sglang_ced.bench.servers import Server, started
from sglang_ced.bench.shapes import generate
from sglang_ced.bench.tools import AIPERF

TOOLS = Path(__file__).parents[2] / "build" / "tools"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (TOOLS / AIPERF.name / "installed").is_file(),
        reason="aiperf is not installed; `QUICK=1 make bench-agents` does that",
    ),
]


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("bench") / "trace.jsonl"
    trace = generate("agentx", 2, 0.01, seed=0, block=64, max_turns=2)
    assert len(trace.requests) < 10  # of ten rows, aiperf 0.13.0 asks the hub for a tokenizer that is a directory
    write_mooncake(trace, file)
    return file


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(model, (), tmp_path_factory.mktemp("server") / "server.log") as server:
        yield server


def test_a_replay_leaves_records_that_agree_with_the_server(
    server: Server, model: Path, trace_file: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "sglang_ced", "bench", "serve", "--url", server.url, "--trace", str(trace_file)]
    command += ["--model", str(model), "--concurrency", "1,2", "--out", str(tmp_path), "--tools", str(TOOLS)]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    assert (tmp_path / "report.html").is_file()
    for agents in (1, 2):
        directory = tmp_path / "serve" / f"agents-{agents}" / "repeat-0"
        records = [json.loads(line) for line in (directory / "requests.jsonl").read_text().splitlines()]
        counters = json.loads((directory / "run.json").read_text())["counters"]
        assert sum(record["cached"] for record in records) == counters["sglang_ced:hit_tokens_total"] > 0
        assert sum(record["input"] for record in records) == counters["sglang:prompt_tokens_total"]
        assert all(0 < record["ttft"] <= record["e2e"] for record in records)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout == first.stdout  # nothing was run again


def test_aiperf_loads_the_trace_unchanged(server: Server, model: Path, trace_file: Path, tmp_path: Path) -> None:
    command = [str(AIPERF.executable(TOOLS)), "profile", "--model", server.model, "--url", server.url]
    command += ["--endpoint-type", "completions", "--streaming", "--tokenizer", str(model)]
    command += ["--input-file", str(trace_file), "--custom-dataset-type", "mooncake_trace", "--isl-block-size", "64"]
    command += ["--concurrency", "1", "--num-sessions", "1", "--artifact-dir", str(tmp_path), "--ui", "none"]
    command += ["--no-gpu-telemetry", "--no-server-metrics", "--extra-inputs", "ignore_eos:true"]
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = (tmp_path / "profile_export.jsonl").read_text().splitlines() if run.returncode == 0 else []
    assert len(lines) == 2, run.stdout[-3000:] + run.stderr[-3000:]
