"""The dashboard against a running server: every metric it names is there after some traffic."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import requests
from servers import Server

pytestmark = pytest.mark.slow

LAUNCH = {"arguments": ("--enable-metrics",)}
DASHBOARD = Path(__file__).parents[2] / "monitoring" / "grafana-dashboard.json"
# Exported at the first such event only, and nothing here brings one about.
_NEEDS_AN_EVENT = {"sglang:evicted_tokens_total"}


def test_a_server_exports_what_the_dashboard_asks_for(server: Server) -> None:
    prompt = [20 + i % 200 for i in range(200)]
    for _ in range(2):
        server.post("/generate", input_ids=prompt, sampling_params={"max_new_tokens": 8, "temperature": 0})
    server.post("/abort_request", rid="no such request")
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    exported = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    declared = {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE")}
    named = set(re.findall(r"\bsglang(?:_ced)?:[a-z0-9_]+", json.dumps(json.loads(DASHBOARD.read_text()))))
    missing = named - exported - declared
    assert missing <= _NEEDS_AN_EVENT
