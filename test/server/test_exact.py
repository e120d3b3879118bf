"""A server with `--no-swa-bounded-replay`: an answer does not depend on what was in the cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from traffic import Traffic, prompt_ids

from sglang_ced.engine.offline import OfflineEngine

if TYPE_CHECKING:
    from servers import Server

LAUNCH = {
    "arguments": (
        *("--no-swa-bounded-replay", "--page-size", "2", "--chunked-prefill-size", "64"),
        *("--max-total-tokens", "2048", "--max-running-requests", "6", "--context-length", "1000"),
    ),
}


def test_a_warm_prompt_answers_as_when_cold(server: Server, exact: OfflineEngine) -> None:
    first = prompt_ids(200, 5)
    longer = first + prompt_ids(71, 6)
    assert server.post("/flush_cache").status_code == 200
    answers = [server.generate(prompt, 6) for prompt in (first, first, longer)]
    # One token at least is computed, and a page of two holds both tokens of a pair.
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0, 198, 200]
    expected = exact.generate([first, longer], 6, stop=[])
    assert [answer["output_ids"] for answer in answers] == [expected[0], *expected]


def test_streams_with_shared_prefixes_equal_their_single_runs(server: Server, exact: OfflineEngine) -> None:
    shared = prompt_ids(160, 7)
    prompts = [shared[: 10 * i] + prompt_ids(1 + 5 * i, 100 + i) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda prompt: server.generate(prompt, 6)["output_ids"], prompts))
    assert together == exact.generate(prompts, 6, stop=[])


def test_random_traffic_answers_as_when_cold(server: Server, exact: OfflineEngine) -> None:
    traffic = Traffic(server.url, seed=1, max_prompt=300, max_new=8)
    traffic.run(clients=6, count=40)
    assert traffic.errors == []
    assert traffic.cached_tokens > 0
    prompts = [prompt for prompt, _ in traffic.answers]
    expected = exact.generate(prompts, 8, stop=[])
    for (_, output), cold in zip(traffic.answers, expected, strict=True):
        assert output == cold[: len(output)]
