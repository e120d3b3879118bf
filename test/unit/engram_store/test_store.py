"""Every placement gives the same bits; a file that changes gives an error and never a wrong row."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sglang_ced.checkpoint.names import CheckpointError
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.engram_store import host, row_cache
from sglang_ced.engram_store.placement import choose
from sglang_ced.engram_store.store import EngramStore
from sglang_ced.engram_store.table import TableError
from sglang_ced.kernels import engram, registry

MakeStore = Callable[..., EngramStore]
Wanted = Callable[[int], dict[int, Tensor]]


def plain(checkpoint: Checkpoint, wanted: dict[int, Tensor]) -> dict[int, Tensor]:
    """The same rows, gathered from views of the checkpoint."""
    return {
        layer: engram.look_up.reference(*checkpoint.table(f"layers.{layer}.engram.embed"), rows)
        for layer, rows in wanted.items()
    }


def fetched(store: EngramStore, wanted: dict[int, Tensor], ahead: bool = False) -> dict[int, Tensor]:
    return {layer: fetch.result() for layer, fetch in store.start(wanted, ahead).items()}


def assert_same(got: dict[int, Tensor], expected: dict[int, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for layer in got:
        assert torch.equal(got[layer].view(torch.int16), expected[layer].view(torch.int16))


# -- bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize(("kind", "cache_mib"), [("mmap", 0), ("mmap", 4), ("ram", 0), ("auto", 4)])
def test_every_placement_gives_the_rows_of_the_file(
    checkpoint: Checkpoint,
    make_store: MakeStore,
    wanted: Wanted,
    kernels: str,
    prefetch: bool,
    kind: str,
    cache_mib: int,
) -> None:
    registry.activate(kernels)
    store = make_store(kind, prefetch, cache_mib)
    for seed in (1, 2, 1):  # the last one comes from the row cache, if there is one
        assert_same(fetched(store, wanted(seed), ahead=seed == 2), plain(checkpoint, wanted(seed)))
    registry.activate()
    stats, rows = store.update_stats(), 3 * sum(rows.numel() for rows in wanted(1).values())
    assert stats.rows == rows
    assert stats.ahead_rows == stats.ahead_used_rows == rows / 3
    assert stats.cache_hits + stats.file_rows == (rows if store.placement == "mmap" else 0)
    assert (stats.cache_hits >= rows / 3) == (store.placement == "mmap" and cache_mib > 0)


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_thread_fetches_where_rows_are_prefetched(
    checkpoint: Checkpoint, make_store: MakeStore, wanted: Wanted, prefetch: bool
) -> None:
    before = set(threading.enumerate())
    store = make_store("ram", prefetch)
    assert_same(fetched(store, wanted(3)), plain(checkpoint, wanted(3)))
    assert len(set(threading.enumerate()) - before) == prefetch


def test_the_thread_ends_with_its_store(make_store: MakeStore, wanted: Wanted) -> None:
    before = set(threading.enumerate())
    store = make_store("mmap")
    fetched(store, wanted(0))
    (thread,) = set(threading.enumerate()) - before
    del store
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


# -- files that change ------------------------------------------------------------------------------------------------


def table_file(checkpoint: Checkpoint) -> Path:
    layer = checkpoint.config.engram_layer_ids[0]
    return checkpoint.table_rows(f"layers.{layer}.engram.embed")[0].file


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_a_truncated_file_ends_the_step(
    checkpoint: Checkpoint, make_store: MakeStore, wanted: Wanted, kernels: str, prefetch: bool
) -> None:
    registry.activate(kernels)
    store = make_store(prefetch=prefetch, cache_mib=0)
    fetched(store, wanted(0))
    os.truncate(table_file(checkpoint), 4096)
    for _ in range(2):
        store.start(wanted(1), ahead=True)
        with pytest.raises(
            TableError, match=r"model\.safetensors: changed while it was served: it had .* and has 4096"
        ):
            fetched(store, wanted(0))
    registry.activate()
    assert store.stats.failures == 2


def test_a_file_that_is_written_to_ends_the_step(checkpoint: Checkpoint, make_store: MakeStore, wanted: Wanted) -> None:
    store = make_store(cache_mib=0)
    expected = fetched(store, wanted(0))
    with table_file(checkpoint).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(last)
    with pytest.raises(TableError, match="was written to; restart to serve what is there now"):
        fetched(store, wanted(0))
    assert expected.keys() == wanted(0).keys()


def test_a_deleted_file_is_served_on_and_told_once(
    checkpoint: Checkpoint, make_store: MakeStore, wanted: Wanted, caplog: pytest.LogCaptureFixture
) -> None:
    store, expected = make_store(cache_mib=0), plain(checkpoint, wanted(0))
    table_file(checkpoint).unlink()
    for _ in range(2):
        assert_same(fetched(store, wanted(0)), expected)
    assert sum("was deleted" in message for message in caplog.messages) == 1


def test_a_file_that_is_replaced_is_served_as_it_was(
    checkpoint: Checkpoint, make_store: MakeStore, wanted: Wanted, tmp_path: Path
) -> None:
    store, expected = make_store(cache_mib=0), plain(checkpoint, wanted(0))
    (tmp_path / "new").write_bytes(bytes(table_file(checkpoint).stat().st_size))
    os.replace(tmp_path / "new", table_file(checkpoint))
    assert_same(fetched(store, wanted(0)), expected)


def test_a_copy_in_memory_outlives_its_file(checkpoint: Checkpoint, make_store: MakeStore, wanted: Wanted) -> None:
    store, expected = make_store("ram"), plain(checkpoint, wanted(0))
    os.truncate(table_file(checkpoint), 0)
    assert_same(fetched(store, wanted(0)), expected)


def test_a_shard_that_ends_before_its_table_is_named(checkpoint: Checkpoint, make_store: MakeStore) -> None:
    file = table_file(checkpoint)
    os.truncate(file, 100_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated: 100000 bytes, but layers\.\d+\.engram"):
        make_store()


# -- choice -----------------------------------------------------------------------------------------------------------


def test_auto_takes_memory_where_half_of_it_is_enough(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert choose("auto", 50 << 30, 100 << 30) == "ram"
    assert choose("auto", 51 << 30, 100 << 30) == "mmap"
    assert "mmap, as tables need 51.00 GiB more and 100.00 GiB are free" in caplog.messages[-1]


def test_ram_that_is_not_there_is_refused_by_name() -> None:
    assert choose("ram", 100, 100) == "ram"
    with pytest.raises(
        TableError, match=r"placement ram: the tables take 2\.00 GiB and 1\.00 GiB are free .* use mmap"
    ):
        choose("ram", 2 << 30, 1 << 30)


def test_auto_joins_a_copy_that_is_there(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_store("ram")
    monkeypatch.setattr(host, "free_bytes", lambda: 0)
    assert make_store("auto").placement == "ram"
    del first


def test_a_cache_too_small_for_its_tables_is_refused_by_name(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_cache, "MIN_ROWS", 1 << 20)
    with pytest.raises(TableError, match=r"engram-cache-mib 1: too small for 2 tables: .*; give at least \d+, or 0"):
        make_store("mmap", cache_mib=1)


def test_huge_pages_are_reported_as_the_kernel_gives_them(make_store: MakeStore) -> None:
    share = make_store("ram").huge_page_share
    assert 0 <= share <= 1
    assert make_store("mmap").huge_page_share == 0
    if host.huge_page_mode(shared=True) in ("advise", "always", "within_size") and host.free_bytes() > 4 << 30:
        assert share > 0.5
