"""The Grafana dashboard asks for metrics that there are. `test/server/test_dashboard.py` asks a running server."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ced.plugin.metrics import COUNTERS, PREFIX

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "monitoring" / "grafana-dashboard.json"
_METRIC = re.compile(r"\bsglang(?:_ced)?:[a-z0-9_]+")
# What a histogram exports under its own name.
_PARTS = re.compile(r"_(bucket|sum|count)$")


def queries(text: str | None = None) -> Iterator[tuple[str, str]]:
    """(panel, query) of all panels and variables of the dashboard."""
    board = json.loads(text or DASHBOARD.read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]


def asked_for() -> set[str]:
    """Metrics that the dashboard names, histograms without the ending of their parts."""
    return {_PARTS.sub("", name) for _, query in queries() for name in _METRIC.findall(query)}


def ours() -> set[str]:
    """Metrics of this package as they are exported. Read from its source: registering them would do so twice."""
    gauges = re.findall(r'(?:gauge|Histogram)\(\s*(?:PREFIX \+ )?"([a-z_]+)"', _metrics_source())
    counters = [*COUNTERS, *re.findall(r'counter\("([a-z_]+)"', _metrics_source())]
    return {PREFIX + name for name in gauges} | {f"{PREFIX}{name}_total" for name in counters}


def _metrics_source() -> str:
    return (ROOT / "python" / "sglang_ced" / "plugin" / "metrics.py").read_text(encoding="utf-8")


def stock() -> set[str]:
    """Metrics that the source of SGLang's collector names."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.fail("sglang is not installed: make setup")
    source = Path(spec.submodule_search_locations[0], "srt", "observability", "metrics_collector.py").read_text()
    return set(re.findall(r'"(sglang:[a-z0-9_]+)"', source))


def test_every_panel_asks_for_a_metric() -> None:
    assert len(list(queries())) > 20
    assert [title for title, query in queries() if not _METRIC.search(query)] == []


def test_every_metric_of_the_dashboard_is_exported() -> None:
    assert asked_for() - ours() - stock() == set()


def test_a_misspelt_metric_is_seen() -> None:
    broken = DASHBOARD.read_text().replace("sglang_ced:hits_total", "sglang_ced:hit_total")
    names = {_PARTS.sub("", name) for _, query in queries(broken) for name in _METRIC.findall(query)}
    assert names - ours() - stock() == {"sglang_ced:hit_total"}


def test_every_panel_has_its_place() -> None:
    """No two panels of the grid of 24 columns overlap."""
    taken: dict[tuple[int, int], str] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
