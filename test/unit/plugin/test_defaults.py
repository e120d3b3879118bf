"""The token cap follows from the bytes that tokens and running requests take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import sglang_ced
from sglang_ced.cache.layout import CacheLayout
from sglang_ced.config import CedConfig
from sglang_ced.plugin import defaults, memory
from sglang_ced.plugin.errors import PluginError

MODEL = Path(sglang_ced.__file__).parent / "assets" / "ced-toy"


def cap(free: int, monkeypatch: pytest.MonkeyPatch, **given: int | None) -> int:
    monkeypatch.setattr(memory, "free_bytes", lambda: free)
    arguments = {"page_size": 64, "max_running_requests": 16, "context_length": None, "dp_size": 1} | given
    return defaults.token_cap(CedConfig.from_dir(MODEL), SimpleNamespace(**arguments))


def test_pool_and_rings_fit_into_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    free, layout = 64 << 20, CacheLayout(CedConfig.from_dir(MODEL))
    tokens = cap(free, monkeypatch)
    assert tokens % 64 == 0
    used = tokens * memory.token_bytes(layout) + 17 * memory.slot_bytes(layout)
    assert used <= free * defaults.KV_SHARE_OF_FREE_MEMORY < used + 64 * memory.token_bytes(layout)


def test_bfloat16_records_leave_room_for_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    free, config = 64 << 20, CedConfig.from_dir(MODEL)
    published = cap(free, monkeypatch)
    monkeypatch.setenv("CED_KV_FORMAT", "bfloat16")
    tokens, layout = cap(free, monkeypatch), CacheLayout(config, "bfloat16")
    used = tokens * memory.token_bytes(layout) + 17 * memory.slot_bytes(layout)
    assert used <= free * defaults.KV_SHARE_OF_FREE_MEMORY < used + 64 * memory.token_bytes(layout)
    assert tokens < published / 2


def test_no_more_than_the_running_requests_can_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cap(1 << 40, monkeypatch) == 16 * 8192
    assert cap(1 << 40, monkeypatch, context_length=1024, max_running_requests=2) == 2 * 1024


def test_too_little_memory_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match="lower --max-running-requests"):
        cap(1 << 20, monkeypatch)


def test_the_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(memory, "_CGROUP_FILES", ((limit, used),))
    without = memory.free_bytes()
    limit.write_text("5000\n")
    used.write_text("2000\n")
    assert memory.free_bytes() == 3000
    limit.write_text("max\n")
    assert memory.free_bytes() > min(without, 3000)
