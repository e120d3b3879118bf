"""What is counted after a forward, logged, and exported."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ced.cache.stats import ReplayStats
from sglang_ced.plugin import metrics
from sglang_ced.plugin.metrics import COUNTERS, ReplayMetrics


@pytest.fixture
def state() -> Any:
    """Stands for a cache state of 8 layers with window records of 66 bytes."""
    layout = SimpleNamespace(window_record=SimpleNamespace(nbytes=66))
    config = SimpleNamespace(num_hidden_layers=8)
    return SimpleNamespace(stats=ReplayStats(), config=config, layout=layout, ring_occupancy=0.5)


def test_every_counter_of_the_state_is_exported() -> None:
    assert COUNTERS.keys() == vars(ReplayStats()).keys()


def test_a_prefill_is_logged_with_what_it_added(state: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    report = ReplayMetrics(state, labels=None)
    state.stats += ReplayStats(forwards=1, new_rows=5, hits=1, hit_tokens=64)
    report.after_forward(prefill=False)
    state.stats += ReplayStats(forwards=1, new_rows=7, hits=2, hit_tokens=128, layer_rows=10, replay_layer_rows=5)
    report.after_forward(prefill=True)
    (line,) = caplog.messages
    assert line.startswith("Prefill replay, #hit: 2, #hit-token: 128, #replay-row: 0, #new-row: 7,")
    assert line.endswith("replay share: 0.50, ring usage: 0.50")


def test_stale_rows_warn_once_a_minute(
    state: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
    report = ReplayMetrics(state, labels=None)
    for moment, stale in ((1000.0, 3), (1030.0, 4), (1061.0, 0), (1062.0, 0)):
        now = moment
        state.stats += ReplayStats(forwards=1, stale_rows=stale)
        report.after_forward(prefill=False)
    assert [message.split()[1] for message in caplog.messages] == ["3", "4"]


def test_labels_are_those_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_labels", None)
    collector = SimpleNamespace(labels={"model_name": "x", "tp_rank": 0})
    metrics.after_reporter_init(None, SimpleNamespace(metrics_collector=collector))
    assert metrics.labels() == {"model_name": "x", "tp_rank": 0}
    metrics.after_reporter_init(None, SimpleNamespace(metrics_collector=None))
    assert metrics.labels() is None


def test_metrics_are_exported_under_our_prefix(state: Any) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    report = ReplayMetrics(state, {"model_name": "a test"})
    state.stats += ReplayStats(forwards=1, rows=12, new_rows=10, replay_rows=2)
    report.after_forward(prefill=False)
    labels = {"model_name": "a test"}
    value = prometheus.REGISTRY.get_sample_value
    assert value("sglang_ced:replay_rows_total", labels) == 2
    assert value("sglang_ced:window_bytes_not_cached_total", labels) == 10 * 8 * 66
    assert value("sglang_ced:rows_per_forward_sum", labels) == 12
    assert value("sglang_ced:ring_occupancy", labels) == 0.5
