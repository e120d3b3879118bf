"""What a server says of its Engram tables, and how it ends requests whose rows are lost."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ced.engram_store.store import EngramStats
from sglang_ced.engram_store.table import TableError
from sglang_ced.plugin import engram
from sglang_ced.plugin.engram import COUNTERS, EngramMetrics
from sglang_ced.plugin.tokens import STATE_KEY, RequestInfo


class Store:
    """Stands for a store of one table in files."""

    def __init__(self) -> None:
        self.stats, self.tables, self.placement, self.huge_page_share = EngramStats(), {1: None}, "mmap", 0.0

    def update_stats(self) -> EngramStats:
        return self.stats


def test_every_counter_of_the_store_is_exported() -> None:
    assert COUNTERS.keys() | {"wait_seconds"} == vars(EngramStats()).keys()


def test_a_prefill_is_logged_with_what_it_added(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = Store()
    report = EngramMetrics(store, labels=None)  # type: ignore[arg-type]
    store.stats.rows = 5
    report.after_forward(prefill=False)
    store.stats = EngramStats(rows=45, bytes=80, wait_seconds=0.25, ahead_rows=8, cache_hits=30, file_rows=10)
    report.after_forward(prefill=True)
    assert caplog.messages == [
        "Prefill engram, #row: 40, #byte: 80, wait: 250.00 ms, #ahead-row: 8, #file-row: 10, cache hits: 0.75, "
        "placement: mmap, huge pages: 0.00"
    ]


def test_metrics_are_exported_under_our_prefix() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    store, labels = Store(), {"model_name": "an engram test"}
    report = EngramMetrics(store, labels)  # type: ignore[arg-type]
    store.stats = EngramStats(rows=7, cache_hits=3, wait_seconds=0.5)
    report.after_forward(prefill=False)
    value = prometheus.REGISTRY.get_sample_value
    assert value("sglang_ced:engram_rows_total", labels) == 7
    assert value("sglang_ced:engram_cache_hits_total", labels) == 3
    assert value("sglang_ced:engram_wait_seconds_sum", labels) == 0.5
    assert value("sglang_ced:engram_in_memory", labels) == 0


@pytest.mark.parametrize("decode", [True, False])
def test_a_failed_forward_ends_its_requests_and_caches_nothing(decode: bool, caplog: pytest.LogCaptureFixture) -> None:
    request = SimpleNamespace(
        output_ids=[4, 5], skip_radix_cache_insert=False, to_finish=None, discard_output_reason=None, finished_len=None
    )
    info = RequestInfo([1, 2], [4, 5], 2, None, decode, request)
    mode = SimpleNamespace(is_decode=lambda: decode)
    batch = SimpleNamespace(model_specific_states={STATE_KEY: [info]}, forward_mode=mode)
    engram.end_requests(batch, TableError("model.safetensors: changed while it was served"))
    reason: Any = request.to_finish if decode else request.discard_output_reason
    assert reason.to_json()["status_code"] == 503
    assert "model.safetensors: changed while it was served" in reason.to_json()["message"]
    assert request.skip_radix_cache_insert
    assert request.finished_len == (2 if decode else None)


def test_sampled_ids_say_which_rows_come_next() -> None:
    asked: list[torch.Tensor] = []
    rows = SimpleNamespace(wants_ahead=True, ahead=asked.append)
    # Two requests: a replayed row and two new ones of a prompt that goes on, then one that decodes.
    history = torch.tensor([[3, 2, 1], [4, 3, 2], [5, 4, 3], [9, 8, 7]])
    step = SimpleNamespace(history=history, new_rows=torch.tensor([1, 2, 3]))
    plan = SimpleNamespace(step=step, next_history=None, rows=SimpleNamespace(new=[2, 1], wanted=[0, 1]))
    runner = SimpleNamespace(
        model=SimpleNamespace(transformer=SimpleNamespace(engram_rows=rows)),
        attn_backend=SimpleNamespace(forward_metadata=plan),
    )
    engram.after_sample(torch.tensor([70, 80]), runner)
    assert [each.tolist() for each in asked] == [[[80, 9, 8]]]
