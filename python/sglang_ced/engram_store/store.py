"""`EngramStore`: rows of all Engram layers for a step, fetched by a thread of its own while earlier layers run."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

import torch
from torch import Tensor

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.engram_store.placement import StoreOptions, open_tables
from sglang_ced.engram_store.table import Table, TableError
from sglang_ced.kernels import engram

logger = logging.getLogger(__name__)

_END_SECONDS = 10.0

Job: TypeAlias = Callable[[], None]


@dataclass
class EngramStats:
    """Counters since the start.

    rows: rows that steps took, bytes: their size as bfloat16. wait_seconds: time that forwards spent on asking and
    waiting for them. ahead_rows: rows fetched before the step that wants them; ahead_used_rows of them were taken by
    it. cache_hits: rows fetched that were in the row cache; file_rows, file_bytes: read from the checkpoint's files.
    failures: steps that ended for want of rows.
    """

    rows: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0
    ahead_rows: int = 0
    ahead_used_rows: int = 0
    cache_hits: int = 0
    file_rows: int = 0
    file_bytes: int = 0
    failures: int = 0


class Fetch:
    """Rows on their way: `count` of them."""

    def __init__(
        self, store: EngramStore, count: int, make: Callable[[], tuple[Tensor, ...]], threaded: bool, ahead: bool
    ) -> None:
        self._store, self._count, self._make, self._ahead = store, count, make, ahead
        self._done: SimpleQueue[tuple[Tensor, ...] | Exception] | None = SimpleQueue() if threaded else None

    def run(self) -> None:
        """Called by the worker."""
        assert self._done is not None
        try:
            self._done.put(self._make())
        except Exception as error:
            self._done.put(error)

    def result(self) -> Tensor:
        """bfloat16 [T, R D] on the model's device; to be asked for once. Raises TableError."""
        start = time.perf_counter()
        found: tuple[Tensor, ...] | Exception
        try:
            found = self._make() if self._done is None else self._done.get()
        except TableError as error:
            found = error
        stats = self._store.stats
        stats.wait_seconds += time.perf_counter() - start
        if isinstance(found, Exception):
            stats.failures += isinstance(found, TableError)
            raise found
        values = self._store.values_of(*found)
        stats.rows += self._count
        stats.ahead_used_rows += self._count * self._ahead
        stats.bytes += values.nbytes
        return values


class EngramStore:
    """Tables of a checkpoint, in the placement that `options` ask for. device: where rows are wanted.

    Not thread-safe. Raises what `open_tables` raises.
    """

    def __init__(self, checkpoint: Checkpoint, options: StoreOptions, device: torch.device) -> None:
        self.stats, self.prefetch, self._device = EngramStats(), options.prefetch, device
        self.placement, self.tables, self.huge_page_share = "none", dict[int, Table](), 0.0
        if checkpoint.config.engram_layer_ids:
            self.placement, self.tables, self.huge_page_share = open_tables(checkpoint, options)
        self._jobs: SimpleQueue[Job | None] | None = None

    def start(self, wanted: Mapping[int, Tensor], ahead: bool = False) -> dict[int, Fetch]:
        """Layer -> rows int64 [T, R], in the order in which layers run -> a fetch for each.

        ahead: for a step that is expected next; whether its fetches are taken is open.
        """
        start = time.perf_counter()
        fetches = {layer: self._fetch(self.tables[layer], rows.cpu(), ahead) for layer, rows in wanted.items()}
        if ahead:
            self.stats.ahead_rows += sum(rows.numel() for rows in wanted.values())
        else:
            self.stats.wait_seconds += time.perf_counter() - start
        return fetches

    def update_stats(self) -> EngramStats:
        """The counters, with those that the tables keep."""
        tables, stats = self.tables.values(), self.stats
        stats.cache_hits = sum(table.hits for table in tables)
        stats.file_rows = sum(table.rows_read for table in tables)
        stats.file_bytes = sum(table.bytes_read for table in tables)
        return stats

    def values_of(self, *found: Tensor) -> Tensor:
        """What a fetch made, as values on the device: values already, or codes, scales and the wanted shape."""
        if len(found) == 1:
            return found[0]
        codes, scales, index = (each.to(self._device) for each in found)
        return engram.look_up(codes, scales, index)

    def _fetch(self, table: Table, rows: Tensor, ahead: bool) -> Fetch:
        make = _values(table, rows, self.prefetch) if self._device.type == "cpu" else _stored(table, rows)
        fetch = Fetch(self, rows.numel(), make, self.prefetch, ahead)
        if self.prefetch:
            self._submit(fetch.run)
        return fetch

    def _submit(self, job: Job) -> None:
        if self._jobs is None:
            self._jobs = SimpleQueue()
            worker = threading.Thread(target=_work, args=(self._jobs,), name="engram", daemon=True)
            worker.start()
            weakref.finalize(self, _end, self._jobs, worker)
        self._jobs.put(job)


def _work(jobs: SimpleQueue[Job | None]) -> None:
    """One thread, as jobs come in the order in which layers want them; reads of a job are in flight together."""
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:
            logger.exception("Engram: a job failed; the thread goes on")
        del job  # or the store that it belongs to would live until the next one


def _end(jobs: SimpleQueue[Job | None], worker: threading.Thread) -> None:
    """When a store goes, and at exit: the interpreter must not end while a thread of it is inside a kernel."""
    jobs.put(None)
    if worker is not threading.current_thread():
        worker.join(_END_SECONDS)


def _values(table: Table, rows: Tensor, serial: bool) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (table.values(rows, serial),)


def _stored(table: Table, rows: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """For another device: rows go there as they are stored, half the bytes, and are dequantised there."""
    return lambda: (*table.stored(rows.flatten()), torch.arange(rows.numel()).view(rows.shape))
