"""`sglang serve` with small chunks, pages and pool: mixed batches, retractions, aborts, slots used again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import requests
from traffic import Traffic, prompt_ids

if TYPE_CHECKING:
    from servers import Server

PAGE = 16
LAUNCH = {
    "traced": True,
    "arguments": (
        *("--page-size", str(PAGE), "--chunked-prefill-size", "48", "--enable-mixed-chunk"),
        *("--max-running-requests", "4", "--max-total-tokens", "1024", "--context-length", "600"),
    ),
    # SGLang's own switch for tests (environ.py): retract requests every few steps.
    "env": {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"},
}


def test_random_traffic_equals_the_offline_engine(server: Server, check_trace: Any) -> None:
    traffic = Traffic(server.url, seed=1, max_prompt=400, max_new=12)
    traffic.run(clients=8, count=80)
    assert traffic.errors == []
    assert traffic.retractions > 0
    report = check_trace(server, traffic.answers, PAGE)
    assert report.hits > 0
    assert report.lives > traffic.sent, "a retracted request begins anew"


def test_abort_in_mid_prefill_leaves_the_pool_usable(server: Server, check_trace: Any) -> None:
    prompt = prompt_ids(500, 3)
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 90}}
    with pytest.raises(requests.Timeout):
        requests.post(f"{server.url}/generate", json=body, timeout=0.1)
    answer = server.generate(prompt, 4)
    check_trace(server, [(prompt, answer["output_ids"])], PAGE)
    assert server.post("/flush_cache").status_code == 200, "no request holds anything"


def test_prompt_beyond_the_context_names_the_limit(server: Server) -> None:
    answer = server.post("/generate", input_ids=prompt_ids(601, 4))
    assert answer.status_code == 400
    assert "600 tokens" in answer.text
    assert len(server.generate(prompt_ids(5, 5), 2)["output_ids"]) == 2
