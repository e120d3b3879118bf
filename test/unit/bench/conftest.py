"""Runs made by hand, so that figures are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from sglang_ced.bench.records import Record, Run

MakeRun = Callable[..., Run]


@pytest.fixture
def make_run() -> MakeRun:
    def make(name: str = "on", agents: int = 1, repeat: int = 0, records: Sequence[Record] = (), **more: Any) -> Run:
        given = list(records) or [
            Record("s0", 0, 0.0, 1.0, 3.0, 100, 5, 0, 0),
            Record("s0", 1, 3.0, 0.5, 2.5, 300, 9, 100, 16),
        ]
        fields: dict[str, Any] = {
            "arguments": ["--flag"],
            "trace": {"digest": "d", "sessions": 1, "requests": 2, "input_mean": 200.0, "input_max": 300,
                      "output_mean": 7.0, "ideal_hit_rate": 0.5},
            "conditions": {"machine": "m", "threads": "2 threads", "commit": "c", "model": "x"},
            "seconds": 7.0,
            "counters": {},
            "memory": {"peak_rss": 2.0**30, "kv_per_token": 80.0},
            "key": {},
        }  # fmt: skip
        return Run(name=name, agents=agents, repeat=repeat, records=given, **(fields | more))

    return make
