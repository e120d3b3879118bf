"""`sglang serve` with small chunks, pages and pool: mixed batches, retractions, aborts and metrics."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import requests
import torch

from sglang_ced.engine.offline import OfflineEngine

if TYPE_CHECKING:
    from conftest import Server

LAUNCH = {
    "command": (str(Path(sys.executable).with_name("sglang")), "serve"),
    "arguments": (
        *("--page-size", "16", "--chunked-prefill-size", "48", "--enable-mixed-chunk"),
        *("--max-running-requests", "4", "--max-total-tokens", "1024", "--context-length", "600"),
        "--enable-metrics",
    ),
    # SGLang's own switch for tests (environ.py): retract requests every few steps.
    "env": {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"},
}


def prompt_ids(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, 250) for _ in range(length)]


def test_chunks_mixed_batches_and_retractions_change_nothing(server: Server, offline: OfflineEngine) -> None:
    shared = prompt_ids(100, 1)
    prompts = [shared[: 33 * i] + prompt_ids(10 + 9 * i, 10 + i) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: server.generate(prompt, 8), prompts))
    assert [answer["output_ids"] for answer in answers] == offline.generate(prompts, 8, stop=[])
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0


def test_prompt_logprobs_over_chunks(server: Server, offline: OfflineEngine) -> None:
    prompt = prompt_ids(130, 2)
    meta = server.generate(prompt, 1, return_logprob=True, logprob_start_len=20)["meta_info"]
    request = offline.start(prompt)
    expected = offline.prefill(request, all_rows=True).log_softmax(-1)
    offline.finish(request)
    found = torch.tensor([entry[0] for entry in meta["input_token_logprobs"][1:]])
    wanted = expected[torch.arange(20, 129), torch.tensor(prompt[21:])]
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)


def test_abort_in_mid_prefill_leaves_the_pool_usable(server: Server, offline: OfflineEngine) -> None:
    prompt = prompt_ids(250, 3)
    with pytest.raises(requests.Timeout):
        requests.post(f"{server.url}/generate", json={"input_ids": prompt}, timeout=0.3)
    assert [server.generate(prompt, 4)["output_ids"]] == offline.generate([prompt], 4, stop=[])


def test_prompt_beyond_the_context_names_the_limit(server: Server) -> None:
    answer = server.post("/generate", input_ids=prompt_ids(601, 4))
    assert answer.status_code == 400
    assert "600 tokens" in answer.text
    assert len(server.generate(prompt_ids(5, 5), 2)["output_ids"]) == 2


def test_metrics_are_served(server: Server) -> None:
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    for name in ("sglang:num_running_reqs", "sglang:prompt_tokens_total", "sglang:cached_tokens_total"):
        assert name in text
