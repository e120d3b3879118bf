"""Replay in numbers: Prometheus metrics beside SGLang's own, and one log line per prefill batch.

Metrics live in the scheduler process, like SGLang's (observability/metrics_collector.py:343), and reach /metrics
through the same directory; prometheus_client must therefore not be imported before SGLang has set it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, fields, replace
from typing import Any

from sglang_ced.cache.state import CacheState
from sglang_ced.cache.stats import ReplayStats

logger = logging.getLogger(__name__)

PREFIX = "sglang_ced:"
ROW_BUCKETS = tuple(2**power for power in range(15))

# Counter of the same name in ReplayStats -> its help text.
COUNTERS = {
    "forwards": "Forward passes.",
    "rows": "Rows run, replay rows included.",
    "new_rows": "Rows that wrote global KV.",
    "replay_rows": "Rows run again to rebuild window KV after a cache hit.",
    "decoder_rows": "Rows that ran in the decoder layers.",
    "trimmed_rows": "Rows that did not.",
    "hits": "Requests that began on cached tokens.",
    "hit_tokens": "Cached tokens that requests began on.",
    "layer_rows": "Rows times layers run.",
    "replay_layer_rows": "The part of layer_rows that replay took.",
    "ring_rows_read": "Window rows of earlier forwards read, each with its owner checked.",
    "stale_rows": "Window rows that were not their request's own; each such window was rebuilt. Should stay 0.",
}
STALE_WARNING_SECONDS = 60.0

_labels: dict[str, str] | None = None


def after_reporter_init(_result: None, reporter: Any) -> None:
    """Note the labels of SGLang's scheduler metrics, which exist with --enable-metrics only."""
    global _labels
    _labels = None if reporter.metrics_collector is None else dict(reporter.metrics_collector.labels)


def labels() -> dict[str, str] | None:
    """Labels of this process's metrics; None = no metrics."""
    return _labels


@dataclass(frozen=True)
class _Exporters:
    counters: dict[str, Any]
    window_bytes: Any
    rows_per_forward: Any
    replay_share: Any
    ring_occupancy: Any

    @classmethod
    def make(cls, labels: dict[str, str]) -> _Exporters:
        from prometheus_client import Counter, Gauge, Histogram

        names = list(labels)

        def counter(name: str, text: str) -> Any:
            return Counter(PREFIX + name, text, names).labels(**labels)

        def gauge(name: str, text: str) -> Any:
            return Gauge(PREFIX + name, text, names, multiprocess_mode="mostrecent").labels(**labels)

        return cls(
            counters={name: counter(name, text) for name, text in COUNTERS.items()},
            window_bytes=counter("window_bytes_not_cached", "Window KV that a cache keeping it would have stored."),
            rows_per_forward=Histogram(
                PREFIX + "rows_per_forward", "Rows of a forward pass.", names, buckets=ROW_BUCKETS
            ).labels(**labels),
            replay_share=gauge("replay_share", "Replay's part of all layer rows since the start, 0 to 1."),
            ring_occupancy=gauge("ring_occupancy", "Part of the window rings' rows that hold a window, 0 to 1."),
        )


class ReplayMetrics:
    """Reports what each forward added to `state.stats`. labels: None = no metrics, log lines only."""

    def __init__(self, state: CacheState, labels: dict[str, str] | None) -> None:
        self._state, self._before = state, ReplayStats()
        self._exporters = None if labels is None else _Exporters.make(labels)
        layers = state.config.num_hidden_layers
        self._window_bytes_per_row = layers * state.layout.window_record.nbytes
        self._warned, self._stale_warned = -STALE_WARNING_SECONDS, 0

    def after_forward(self, prefill: bool) -> None:
        """Call once after every forward; `prefill` batches, mixed ones too, get a log line.

        SGLang logs its own line of a batch later, when it has handled the result.
        """
        now = self._state.stats
        added = ReplayStats(**{f.name: getattr(now, f.name) - getattr(self._before, f.name) for f in fields(now)})
        self._before = replace(now)
        if self._exporters is not None:
            self._export(self._exporters, added)
        if prefill:
            logger.info(
                "Prefill replay, #hit: %d, #hit-token: %d, #replay-row: %d, #new-row: %d, #decoder-row: %d, "
                "#trimmed-row: %d, replay share: %.2f, ring usage: %.2f",
                added.hits, added.hit_tokens, added.replay_rows, added.new_rows, added.decoder_rows, added.trimmed_rows,
                added.replay_share, self._state.ring_occupancy,
            )  # fmt: skip
        if now.stale_rows > self._stale_warned:
            self._warn(now.stale_rows)

    def _warn(self, stale_rows: int) -> None:
        """At most once a minute; what comes in between is in the next warning."""
        moment = time.monotonic()
        if moment - self._warned >= STALE_WARNING_SECONDS:
            logger.warning(
                "sglang-ced: %d window rows were not their request's own; those windows were rebuilt. This is a fault: "
                "please report it with the launch command",
                stale_rows - self._stale_warned,
            )
            self._warned, self._stale_warned = moment, stale_rows

    def _export(self, exporters: _Exporters, added: ReplayStats) -> None:
        for name, counter in exporters.counters.items():
            counter.inc(getattr(added, name))
        exporters.window_bytes.inc(added.new_rows * self._window_bytes_per_row)
        exporters.rows_per_forward.observe(added.rows)
        exporters.replay_share.set(self._before.replay_share)
        exporters.ring_occupancy.set(self._state.ring_occupancy)
