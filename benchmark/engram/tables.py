"""The stores that the benchmark compares, and the page cache that it empties."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from benchmark.shape.ced_bench import CACHE, checkpoint_dir, raw_config, remove_interrupted
from benchmark.shape.large_tables import OTHERS, enlarge, table_fields
from torch import Tensor

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.engram_store.placement import StoreOptions, stored_tables
from sglang_ced.engram_store.store import EngramStore
from sglang_ced.kernels import engram

# Rows of the released model: 3 orders of 8 heads, 256 values.
RELEASED_ROWS = {"engram_n_heads": 8, "engram_head_dim": 256}
TRIVIAL_VOCAB = 101

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PlainTable:
    """What one would write first: views of the mapped checkpoint, in pages of 4 KiB, gathered when a layer asks, with
    all threads of the forward and the same kernel. It reads no page around the one it needs, which it would else, up to
    `read_ahead_kb` of the disk."""

    hits = rows_read = bytes_read = 0

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales
        for view in (codes, scales):
            begin = view.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            _libc.madvise(begin, view.data_ptr() + view.nbytes - begin, mmap.MADV_RANDOM)

    def values(self, rows: Tensor, serial: bool) -> Tensor:
        return engram.look_up(self.codes, self.scales, rows)

    def stored(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def checkpoints(quick: bool, table_vocab: int) -> tuple[Path, Path]:
    """ced-bench with rows as wide as the released ones: with 24 * table_vocab of them in each table, and with so few
    that any cache holds them. All other weights of the two are in one file."""
    source = checkpoint_dir(quick, changes=table_fields(raw_config(quick), TRIVIAL_VOCAB, **RELEASED_ROWS))
    paths = [CACHE / f"{source.name}-tables-{vocab}" for vocab in (table_vocab, TRIVIAL_VOCAB)]
    if not all(path.is_dir() for path in paths):
        remove_interrupted()
        for path, vocab in zip(paths, (table_vocab, TRIVIAL_VOCAB), strict=True):
            shutil.rmtree(path, ignore_errors=True)
            staging = CACHE / f".{path.name}.{os.getpid()}.partial"
            enlarge(source, staging, vocab, sparse=False)
            if path is not paths[0]:
                (staging / OTHERS).unlink()
                (staging / OTHERS).hardlink_to(paths[0] / OTHERS)
            staging.rename(path)
    return paths[0], paths[1]


def open_store(checkpoint: Checkpoint, kind: str) -> EngramStore:
    """kind: plain, or a placement, with `-sync` behind it for rows fetched when a layer asks."""
    placement, _, sync = kind.partition("-")
    if placement != "plain":
        return EngramStore(checkpoint, StoreOptions(placement, not sync), torch.device("cpu"))  # type: ignore[arg-type]
    store = EngramStore(checkpoint, StoreOptions("mmap", False, 0), torch.device("cpu"))
    map_plain(store, checkpoint)
    return store


def map_plain(store: EngramStore, checkpoint: Checkpoint) -> None:
    """Give the store plain tables, with no page of them mapped yet."""
    store.tables = {
        layer: PlainTable(*Checkpoint.open(checkpoint.path).table(f"layers.{layer}.engram.embed"))
        for layer in checkpoint.config.engram_layer_ids
    }


def cool(store: EngramStore, checkpoint: Checkpoint, files: list[Path]) -> None:
    """Empty the page cache of the tables. Mapped pages would stay in it, so plain tables are mapped anew."""
    plain = any(isinstance(table, PlainTable) for table in store.tables.values())
    if plain:
        store.tables.clear()
        gc.collect()
    evict(files)
    if plain:
        map_plain(store, checkpoint)


def table_files(checkpoint: Checkpoint) -> list[Path]:
    return sorted({part.file for parts in stored_tables(checkpoint).values() for part in parts})


def evict(files: list[Path]) -> None:
    """Drop the files from the page cache; mapped pages stay."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(files: list[Path]) -> None:
    """Read the files into the page cache."""
    buffer = bytearray(64 << 20)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def touch(store: EngramStore) -> None:
    """Map every page of plain tables, which the page cache holds already."""
    for table in store.tables.values():
        if isinstance(table, PlainTable):
            for view in (table.codes, table.scales):
                view.flatten()[::4096].sum()


Ceilings = dict[str, float]


def ceilings(files: list[Path], store: EngramStore, measure: Callable[[Callable[[], object]], float]) -> Ceilings:
    """What the machine can do at best.

    disk_reads_per_s: random reads of 4 KiB past the page cache, 64 at a time. memory_rows_per_s: random rows of 256
    bytes copied from huge pages by torch's threads.
    """
    size, count, generator = files[0].stat().st_size, 4096, torch.Generator().manual_seed(3)
    pages = torch.randint(size // mmap.PAGESIZE, (64, count // 64), generator=generator) * mmap.PAGESIZE
    descriptor = os.open(files[0], os.O_RDONLY | os.O_DIRECT)

    def read(offsets: list[int]) -> None:
        page = mmap.mmap(-1, mmap.PAGESIZE)  # O_DIRECT wants an aligned buffer
        for offset in offsets:
            os.preadv(descriptor, [page], offset)

    try:
        with ThreadPoolExecutor(64) as pool:
            disk = measure(lambda: list(pool.map(read, pages.tolist())))
    finally:
        os.close(descriptor)
    codes = next(iter(store.tables.values())).codes  # type: ignore[attr-defined]
    rows = torch.randint(len(codes), (1 << 16,), generator=generator)
    memory = min(measure(lambda: codes.index_select(0, rows)) for _ in range(5))
    return {"disk_reads_per_s": count / disk, "memory_rows_per_s": len(rows) / memory}
