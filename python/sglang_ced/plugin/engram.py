"""Engram tables in a server: metrics, the log line, rows of sampled tokens ahead, and requests whose rows are lost."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, fields, replace
from http import HTTPStatus
from typing import Any

import torch
from torch import Tensor

from sglang_ced.engram_store.store import EngramStats, EngramStore
from sglang_ced.engram_store.table import TableError
from sglang_ced.plugin.metrics import PREFIX
from sglang_ced.plugin.tokens import requests_of

logger = logging.getLogger(__name__)

# Counter of the same name in EngramStats -> its help text.
COUNTERS = {
    "rows": "Table rows that steps took.",
    "bytes": "Bytes of these as bfloat16.",
    "ahead_rows": "Table rows fetched before the step that wants them: of next chunks and of sampled tokens.",
    "ahead_used_rows": "Table rows of these that steps took.",
    "cache_hits": "Table rows fetched that were in the row cache.",
    "file_rows": "Table rows read from the checkpoint's files.",
    "file_bytes": "Bytes of these, as stored.",
    "failures": "Forwards that ended because rows could not be had. Should stay 0.",
}
WAIT_BUCKETS = tuple(4.0**power * 1e-6 for power in range(12))  # a microsecond to four seconds
ERROR_SECONDS = 60.0


@dataclass(frozen=True)
class Exporters:
    """What /metrics has of the tables."""

    counters: dict[str, Any]
    wait: Any

    @classmethod
    def make(cls, labels: dict[str, str], huge_page_share: float, in_memory: bool) -> Exporters:
        """Register the metrics, and set those that stay as they are."""
        from prometheus_client import Counter, Gauge, Histogram

        names = list(labels)
        for name, text, value in (
            ("engram_huge_page_share", "Part of the tables in memory that huge pages hold, 0 to 1.", huge_page_share),
            ("engram_in_memory", "1 where the tables are in memory, 0 where rows are read from files.", in_memory),
        ):
            Gauge(PREFIX + name, text, names, multiprocess_mode="mostrecent").labels(**labels).set(value)
        wait = Histogram(
            PREFIX + "engram_wait_seconds",
            "Time that a forward stood still for table rows.",
            names,
            buckets=WAIT_BUCKETS,
        )
        counters = {
            name: Counter(f"{PREFIX}engram_{name}", text, names).labels(**labels) for name, text in COUNTERS.items()
        }
        return cls(counters, wait.labels(**labels))


class EngramMetrics:
    """Reports what each forward added to the stats of `store`. labels: None = no metrics, log lines only."""

    def __init__(self, store: EngramStore, labels: dict[str, str] | None) -> None:
        self._store, self._before, self._exporters = store, EngramStats(), None
        if labels is not None and store.tables:
            self._exporters = Exporters.make(labels, store.huge_page_share, store.placement == "ram")

    def after_forward(self, prefill: bool) -> None:
        """Call once after every forward; `prefill` batches get a log line."""
        if not self._store.tables:
            return
        now = self._store.update_stats()
        added = EngramStats(**{f.name: getattr(now, f.name) - getattr(self._before, f.name) for f in fields(now)})
        self._before = replace(now)
        if self._exporters is not None:
            for name, counter in self._exporters.counters.items():
                counter.inc(getattr(added, name))
            self._exporters.wait.observe(added.wait_seconds)
        if prefill:
            found = added.cache_hits + added.file_rows
            logger.info(
                "Prefill engram, #row: %d, #byte: %d, wait: %.2f ms, #ahead-row: %d, #file-row: %d, cache hits: %.2f, "
                "placement: %s, huge pages: %.2f",
                added.rows, added.bytes, added.wait_seconds * 1e3, added.ahead_rows, added.file_rows,
                added.cache_hits / found if found else 0.0, self._store.placement, self._store.huge_page_share,
            )  # fmt: skip


_told = -ERROR_SECONDS


def end_requests(forward_batch: Any, error: TableError) -> None:
    """End every request of a batch whose forward failed, with status 503 and the reason, and keep what it computed out
    of the prefix cache.

    SGLang asks for such an end by `discard_output_reason` where it handles a prefill
    (managers/scheduler_components/batch_result_processor.py:316) and by `to_finish` where it handles a decode batch,
    whose token is then cut off by `finished_len`.
    """
    global _told
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    infos = requests_of(forward_batch)
    if time.monotonic() - _told >= ERROR_SECONDS:
        _told = time.monotonic()
        logger.error("sglang-ced: %d requests end: %s", len(infos), error)
    for info in infos:
        request = info.request
        reason = FINISH_ABORT(f"Engram table: {error}", HTTPStatus.SERVICE_UNAVAILABLE, "EngramTableError")
        request.skip_radix_cache_insert = True
        if forward_batch.forward_mode.is_decode():
            request.to_finish, request.finished_len = reason, len(request.output_ids)
        else:
            request.discard_output_reason = reason


def after_sample(next_ids: Tensor, runner: Any, *_: Any, **__: Any) -> None:
    """Sampled ids say which rows the next step needs (model_executor/model_runner.py:2103)."""
    engram_rows = runner.model.transformer.engram_rows
    plan = runner.attn_backend.forward_metadata
    if not engram_rows.wants_ahead or plan is None or plan.step is None or plan.next_history is not None:
        return
    ends = torch.tensor(plan.rows.new).cumsum(0)  # each request's rows: replayed ones first, its new ones last
    goes_on = [i for i, wanted in enumerate(plan.rows.wanted) if wanted]
    last = plan.step.history[plan.step.new_rows[ends - 1]]
    engram_rows.ahead(torch.cat((next_ids.view(-1, 1), last[:, :-1]), 1)[goes_on])
