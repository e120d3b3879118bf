"""The dashboard against a running server: every metric it names is there after some traffic."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import requests
from servers import Server

pytestmark = pytest.mark.slow

LAUNCH = {"arguments": ("--enable-metrics",)}
DASHBOARD = Path(__file__).parents[2] / "monitoring" / "grafana-dashboard.json"
# Exported at the first such event only, which a pool of this size does not see.
_NEEDS_AN_EVENT = {"sglang:evicted_tokens_total"}
SECONDS = 60


def _traffic(server: Server) -> None:
    """A cold prompt and a hit, streamed, and a request whose client goes away."""
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [20 + i % 200 for i in range(200)], "sampling_params": sampling, "stream": True}
    for _ in range(2):
        assert server.post("/generate", **body).status_code == 200
    body["sampling_params"] = sampling | {"max_new_tokens": 4000}
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=SECONDS) as answer:
        next(answer.iter_content(64))


def _exported(server: Server) -> set[str]:
    text = requests.get(f"{server.url}/metrics", timeout=SECONDS).text
    return set(re.findall(r"^(sglang[a-z_]*:[a-z0-9_]+)", text, re.MULTILINE))


def test_a_server_exports_what_the_dashboard_asks_for(server: Server) -> None:
    named = set(re.findall(r"\bsglang(?:_ced)?:[a-z0-9_]+", DASHBOARD.read_text()))
    _traffic(server)
    deadline = time.monotonic() + SECONDS  # an abort is counted a moment after the client has gone
    while named - _exported(server) - _NEEDS_AN_EVENT and time.monotonic() < deadline:
        time.sleep(1)
    assert named - _exported(server) - _NEEDS_AN_EVENT == set()
