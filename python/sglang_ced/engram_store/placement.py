"""Choosing a placement, and opening the tables there."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from torch import Tensor

from sglang_ced.checkpoint.files import StoredRows
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.engram_store import host
from sglang_ced.engram_store.file_table import FileTable, OpenFile
from sglang_ced.engram_store.ram_table import RamTable
from sglang_ced.engram_store.row_cache import MIN_ROWS, RowCache, places
from sglang_ced.engram_store.shared_memory import HUGE_PAGE, SharedBytes, is_held, share
from sglang_ced.engram_store.table import Table, TableError

logger = logging.getLogger(__name__)

Placement: TypeAlias = Literal["auto", "mmap", "ram"]
PLACEMENTS: tuple[Placement, ...] = ("auto", "mmap", "ram")
Parts: TypeAlias = tuple[StoredRows, StoredRows]

SHARE_OF_FREE_MEMORY = 0.5
CACHE_MIB = 256
_READ_BYTES = 64 << 20


@dataclass(frozen=True)
class StoreOptions:
    """placement: where tables are kept. prefetch: fetch rows while earlier layers run. cache_mib: memory for rows that
    come again, over all tables, where they are kept in files; 0 = none."""

    placement: Placement = "auto"
    prefetch: bool = True
    cache_mib: int = CACHE_MIB


def stored_tables(checkpoint: Checkpoint) -> dict[int, Parts]:
    """Where each Engram layer's rows lie. Raises CheckpointError if a shard ends before its table does."""
    return {i: checkpoint.table_rows(f"layers.{i}.engram.embed") for i in checkpoint.config.engram_layer_ids}


def table_bytes(tables: Mapping[int, Parts]) -> int:
    """Bytes of all tables in memory."""
    return sum(_aligned(part.nbytes) for parts in tables.values() for part in parts)


def choose(placement: Placement, needed: int, free: int) -> Literal["mmap", "ram"]:
    """auto -> ram where `needed` bytes are at most half of the `free` ones, else mmap. needed: 0 if a copy is there.

    Raises TableError where ram is asked for and cannot be had.
    """
    if placement == "auto":
        placement = "ram" if needed <= free * SHARE_OF_FREE_MEMORY else "mmap"
        logger.info(
            "Engram placement auto: %s, as tables need %.2f GiB more and %.2f GiB are free (ram: up to %.0f %% of it)",
            placement, needed / 2**30, free / 2**30, SHARE_OF_FREE_MEMORY * 100,
        )  # fmt: skip
    elif placement == "ram" and needed > free:
        raise TableError(
            f"engram-placement ram: the tables take {needed / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free "
            "(memory, or the limit of the control group); use mmap"
        )
    return placement


@dataclass(frozen=True)
class Plan:
    """What will be done: `chosen` placement; new_bytes: of memory that it takes, for tables or row caches."""

    chosen: Literal["mmap", "ram"]
    new_bytes: int
    key: str
    stored: dict[int, Parts]
    files: dict[Path, OpenFile]


def plan(checkpoint: Checkpoint, options: StoreOptions) -> Plan:
    """Choose. Raises TableError (too little memory, a row cache too small), CheckpointError (a shard ends before its
    table does) and OSError (a file that cannot be opened)."""
    stored = stored_tables(checkpoint)
    files = {path: OpenFile(path) for path in {part.file for parts in stored.values() for part in parts}}
    key, size = _key(stored, files), table_bytes(stored)
    needed = 0 if is_held(key, size) else size
    chosen = choose(options.placement, needed, host.free_bytes())
    if chosen == "mmap":
        _cache_budget(stored, options.cache_mib)
        needed = options.cache_mib << 20
    return Plan(chosen, needed, key, stored, files)


def open_tables(checkpoint: Checkpoint, options: StoreOptions) -> tuple[str, dict[int, Table], float]:
    """(placement in use, table by layer, part of the copy that is in huge pages).

    Raises what `plan` raises, and TableError where a file fails while it is read.
    """
    made = plan(checkpoint, options)
    stored, files = made.stored, made.files
    if made.chosen == "mmap":
        budget, in_files = _cache_budget(stored, options.cache_mib), dict[int, Table]()
        for layer, (codes, scales) in stored.items():
            cache = RowCache(budget, (codes.width, scales.width)) if budget else None
            in_files[layer] = FileTable(codes, scales, files, cache)
        return "mmap", in_files, 0.0
    parts = [part for both in stored.values() for part in both]
    copy = share(made.key, table_bytes(stored), lambda to: _fill(to, parts, files))
    views = iter(_views(copy.bytes, parts))
    return "ram", {layer: RamTable(next(views), next(views)) for layer in stored}, _report(copy)


def _cache_budget(stored: Mapping[int, Parts], cache_mib: int) -> int:
    """Bytes of each table's row cache. Raises TableError where that is too small to be one."""
    budget = (cache_mib << 20) // len(stored)
    rows = [(codes.width, scales.width) for codes, scales in stored.values()]
    try:
        for widths in rows if budget else ():
            places(budget, widths)
    except ValueError as error:
        least = math.ceil(max(sum(widths) + 8 for widths in rows) * MIN_ROWS * len(stored) / 2**20)
        raise TableError(
            f"engram-cache-mib {cache_mib}: too small for {len(stored)} tables: {error}; give at least {least}, or 0 "
            "for no cache"
        ) from error
    return budget


# -- the copy in memory -----------------------------------------------------------------------------------------------


def _aligned(nbytes: int) -> int:
    return -(-nbytes // HUGE_PAGE) * HUGE_PAGE


def _key(stored: Mapping[int, Parts], files: Mapping[Path, OpenFile]) -> str:
    """Names the content: which bytes of which files, and the state of these."""
    digest = hashlib.sha256()
    for path, file in sorted(files.items()):
        found = os.fstat(file.fd)
        digest.update(repr((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)).encode())
        digest.update(repr([p for both in stored.values() for p in both if p.file == path]).encode())
    return f"engram-{digest.hexdigest()[:24]}"


def _views(copy: Tensor, parts: Sequence[StoredRows]) -> list[Tensor]:
    """uint8 [rows, width] of each part, one after the other, each from a huge page's begin on."""
    out, begin = [], 0
    for part in parts:
        out.append(copy[begin : begin + part.nbytes].view(part.count, part.width))
        begin += _aligned(part.nbytes)
    return out


def _fill(copy: Tensor, parts: Sequence[StoredRows], files: Mapping[Path, OpenFile]) -> None:
    progress = Progress("Engram tables into memory", sum(part.nbytes for part in parts))
    for part, view in zip(parts, _views(copy, parts), strict=True):
        file, to = files[part.file], view.numpy().data.cast("B")
        done = 0
        while done < part.nbytes:
            got = os.preadv(file.fd, [to[done : done + _READ_BYTES]], part.offset + done)
            if not got:
                file.check()
                raise TableError(f"{part.file}: ends before its Engram table does")
            done += got
            progress.add(got)
    for file in files.values():
        file.check()


def _report(copy: SharedBytes) -> float:
    share_of_huge = copy.huge_page_share
    logger.info(
        "Engram tables: %.2f GiB in memory, %s; %.1f %% of it in huge pages",
        len(copy.bytes) / 2**30, "filled by this process" if copy.filled else "shared with another process",
        share_of_huge * 100,
    )  # fmt: skip
    if share_of_huge < 0.9:
        logger.warning(
            "Engram tables: %.0f %% in pages of 4 KiB, which makes look-ups slower, not wrong; the kernel's modes are "
            "%s (anonymous) and %s (shared): see `ced doctor`",
            (1 - share_of_huge) * 100, host.huge_page_mode(shared=False), host.huge_page_mode(shared=True),
        )  # fmt: skip
    return share_of_huge


class Progress:
    """A bar on a terminal; elsewhere a log line every ten seconds."""

    _WIDTH, _LOG_SECONDS = 30, 10.0

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._start = self._told = time.monotonic()

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        now, ended = time.monotonic(), self._done >= self._total
        bar = sys.stderr.isatty()
        if not ended and now - self._told < (0.2 if bar else self._LOG_SECONDS):
            return
        self._told = now
        share_done, seconds = self._done / self._total, max(now - self._start, 1e-6)
        text = f"{share_done:4.0%} of {self._total / 1e9:.2f} GB, {self._done / 1e9 / seconds:.2f} GB/s"
        if bar:
            filled = "#" * int(share_done * self._WIDTH)
            print(f"\r{self._what} [{filled:<{self._WIDTH}}] {text}", end="\n" if ended else "", file=sys.stderr)
        elif now - self._start >= self._LOG_SECONDS:
            logger.info("%s: %s", self._what, text)
