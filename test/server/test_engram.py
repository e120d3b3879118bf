"""A server whose tables stay in files: its answers, its metrics, and what it does when a file changes under it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from benchmark.shape.large_tables import TABLES, enlarge
from oracle import after_hit
from servers import Server
from traffic import prompt_ids

from sglang_ced.config import CedConfig
from sglang_ced.engine.offline import OfflineEngine
from sglang_ced.engram_store.placement import StoreOptions

FILES = ("--ced-engram-placement", "mmap", "--ced-engram-cache-mib", "0")
LAUNCH = (*FILES, "--enable-metrics", "--chunked-prefill-size", "64", "--max-total-tokens", "8192")


@pytest.fixture(scope="module")
def own_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ced-toy with other tables, in a shard of their own as the released ones are; the tests change its files."""
    path = tmp_path_factory.mktemp("model") / "ced-toy"
    enlarge(model, path, 2 * CedConfig.from_dir(model).engram_vocab_size, sparse=False)
    return path


@pytest.fixture(scope="module")
def bounded(own_model: Path) -> OfflineEngine:
    """What its answers must equal; its tables are a copy in memory."""
    engram = StoreOptions("ram")
    return OfflineEngine.from_pretrained(own_model, replay="bounded", max_tokens=16384, page_size=2, engram=engram)


@pytest.fixture(scope="module")
def server(own_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(own_model, tmp_path_factory.mktemp("server") / "log.txt", LAUNCH)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


@pytest.fixture
def changed(own_model: Path) -> Iterator[Callable[[], None]]:
    """Make every shard look written to; afterwards as before."""
    before = {shard: shard.stat() for shard in own_model.glob("*.safetensors")}
    yield lambda: [shard.touch() for shard in before]
    for shard, stat in before.items():
        os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_answers_are_those_of_the_offline_engine_and_rows_are_counted(server: Server, bounded: OfflineEngine) -> None:
    prompt, before = prompt_ids(200, 5), server.metrics()
    assert server.generate(prompt, 8)["output_ids"] == after_hit(bounded, prompt, 8, 0)[0]
    after, config = server.metrics(), bounded.config
    added = {name: value - before.get(name, 0) for name, value in after.items()}
    per_token = config.engram_rows_per_token * len(config.engram_layer_ids)
    assert added["engram_rows_total"] >= 207 * per_token
    assert added["engram_ahead_rows_total"] >= (200 - 64 + 7) * per_token, "next chunks and sampled tokens"
    assert added["engram_ahead_used_rows_total"] >= (200 - 64 + 6) * per_token
    fetched = added["engram_rows_total"] + added["engram_ahead_rows_total"] - added["engram_ahead_used_rows_total"]
    assert added["engram_file_rows_total"] == fetched
    assert added["engram_wait_seconds_count"] == added["forwards_total"]
    assert after["engram_failures_total"] == after["engram_in_memory"] == 0
    assert "Prefill engram, #row: " in server.output()


def test_a_changed_file_ends_requests_by_name_and_leaves_no_trace(
    server: Server, bounded: OfflineEngine, changed: Callable[[], None], own_model: Path
) -> None:
    prompt = prompt_ids(150, 6)
    changed()
    for _ in range(2):
        answer = server.post("/generate", input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 4})
        assert answer.status_code == 503
        assert "changed while it was served: it was written to; restart" in answer.text
        assert str(own_model) in answer.text
    assert server.process.poll() is None


def test_and_once_the_file_is_right_again_so_are_the_answers(server: Server, bounded: OfflineEngine) -> None:
    """Nothing of the failed prefill was kept in the prefix cache."""
    prompt = prompt_ids(150, 6)
    answer = server.generate(prompt, 4)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["output_ids"] == after_hit(bounded, prompt, 4, 0)[0]


def test_a_stream_ends_where_the_file_changed(
    server: Server, bounded: OfflineEngine, changed: Callable[[], None]
) -> None:
    prompt = prompt_ids(40, 7)
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 2000, "ignore_eos": True},
        "stream": True,
    }
    last, ids = {}, []
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=300) as answer:
        for line in answer.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            last = json.loads(line[6:])
            ids = last.get("output_ids", ids)
            if len(ids) == 5:
                changed()
    reason = last["meta_info"]["finish_reason"] if "meta_info" in last else last["error"]
    assert "changed while it was served" in json.dumps(reason)
    assert 5 <= len(ids) < 2000
    assert ids == after_hit(bounded, prompt, len(ids), 0)[0]


def test_a_truncated_file_ends_requests_and_not_the_server(server: Server, own_model: Path) -> None:
    """Through a mapping this would be a SIGBUS."""
    os.truncate(own_model / TABLES, 4096)
    for seed in (8, 9):
        answer = server.post("/generate", input_ids=prompt_ids(100, seed), sampling_params={"max_new_tokens": 4})
        assert answer.status_code == 503
        assert f"{TABLES}: changed while it was served: it had " in answer.text
        assert "and has 4096; restart" in answer.text
    assert server.process.poll() is None
    assert server.metrics()["engram_failures_total"] >= 2
