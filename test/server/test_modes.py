"""Bounded replay in every scheduling mode: random traffic, each sampled token held against the offline engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from servers import Server
from traffic import Traffic

SMALL = ("--max-total-tokens", "2048", "--max-running-requests", "6", "--context-length", "600")
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "11"}
MIXED, OVERLAP = "--enable-mixed-chunk", "--ced-overlap-schedule"
PRIORITY = ("--enable-priority-scheduling", "--default-priority-value", "0")

# (page, chunk, other options, environment, replay mode)
MODES: dict[str, tuple[int, int, tuple[str, ...], dict[str, str], str]] = {
    "page 2, mixed, overlap, retraction": (2, 64, (MIXED, OVERLAP, *SMALL), RETRACT, "bounded"),
    "page 16, chunk 144": (16, 144, SMALL, {}, "bounded"),
    "page 64, overlap, retraction": (64, 256, (OVERLAP, *SMALL), RETRACT, "bounded"),
    "page 256, priorities": (
        256,
        256,
        (*PRIORITY, "--max-total-tokens", "6144", "--max-running-requests", "3", "--context-length", "1600"),
        {},
        "bounded",
    ),
    "bfloat16 records, mixed, retraction": (16, 64, ("--ced-kv-format", "bfloat16", MIXED, *SMALL), RETRACT, "bounded"),
    "exact, mixed, overlap, retraction": (
        16,
        64,
        ("--no-swa-bounded-replay", MIXED, OVERLAP, *SMALL),
        RETRACT,
        "exact",
    ),
    "encoder alone, mixed, retraction": (
        16,
        64,
        ("--no-enable-decoder-swa-bounded-replay", MIXED, *SMALL),
        RETRACT,
        "encoder",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_random_traffic_equals_the_offline_engine(name: str, model: Path, tmp_path: Path, check_trace: Any) -> None:
    page, chunk, options, environment, replay = MODES[name]
    arguments = ("--page-size", str(page), "--chunked-prefill-size", str(chunk), *options)
    server = Server(model, tmp_path / "log.txt", arguments, env=environment, traced=True)
    try:
        server.wait_ready()
        longest = int(arguments[arguments.index("--context-length") + 1]) - 100
        traffic = Traffic(server.url, seed=2, max_prompt=longest, priorities=PRIORITY[0] in options)
        traffic.run(clients=9, count=150)
        assert traffic.errors == []
        report = check_trace(server, traffic.answers, page, replay)
        assert report.hits > 0
        assert report.checked > 1000
        if environment:
            assert traffic.retractions > 0
        assert server.post("/flush_cache").status_code == 200, "no request holds anything"
    finally:
        server.stop()
