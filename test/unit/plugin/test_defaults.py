"""The token cap follows from the bytes that tokens and running requests take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import sglang_ced
from sglang_ced.cache.layout import CacheLayout
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.config import CedConfig
from sglang_ced.engram_store import host, placement
from sglang_ced.plugin import defaults, memory
from sglang_ced.plugin.errors import PluginError
from sglang_ced.plugin.flags import Options, options_of

MODEL = Path(sglang_ced.__file__).parent / "assets" / "ced-toy"


def cap(free: int, monkeypatch: pytest.MonkeyPatch, **given: int | None) -> int:
    monkeypatch.setattr(host, "free_bytes", lambda: free)
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


def test_tables_in_memory_leave_less_for_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CedConfig.from_dir(MODEL)
    arguments = SimpleNamespace(page_size=64, max_running_requests=16, context_length=None, dp_size=1)
    less = cap(48 << 20, monkeypatch)
    assert cap(64 << 20, monkeypatch) == defaults.token_cap(config, arguments, 0) > less
    assert defaults.token_cap(config, arguments, 16 << 20) == less


def test_the_placement_is_chosen_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, checkpoint = SimpleNamespace(_ced={}), Checkpoint.open(MODEL)
    monkeypatch.setattr(placement, "is_held", lambda *_: False)
    monkeypatch.setattr(host, "free_bytes", lambda: 1 << 40)
    assert defaults.place_tables(checkpoint, Options(), launch) > 0
    assert options_of(launch).ced_engram_placement == "ram"
    launch._ced.clear()
    monkeypatch.setattr(host, "free_bytes", lambda: 1 << 10)
    assert defaults.place_tables(checkpoint, Options(ced_engram_cache_mib=8), launch) == 8 << 20
    assert options_of(launch).ced_engram_placement == "mmap"
    with pytest.raises(PluginError, match=r"--ced-engram-placement ram: the tables take .* use mmap"):
        defaults.place_tables(checkpoint, Options(ced_engram_placement="ram"), launch)
