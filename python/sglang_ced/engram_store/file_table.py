"""Placement `mmap`: rows stay in the checkpoint's files, and the page cache keeps what was read."""

from __future__ import annotations

import errno
import logging
import os
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sglang_ced.checkpoint.files import StoredRows
from sglang_ced.engram_store.row_cache import Bytes, Ints, RowCache
from sglang_ced.engram_store.table import TableError
from sglang_ced.kernels import engram

logger = logging.getLogger(__name__)


class OpenFile:
    """A shard held open, and how it was then.

    Every write and every truncation changes time or size before the first changed byte can be read, so rows that were
    read before an unchanged `check` are those of the file that was opened. A file that is deleted, or replaced by a
    new one of its name, stays as it was for those who hold it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.fd = path, os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd).atexit = False  # where a thread may still read
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        self._opened, self._deleted = self._state(), False

    def check(self) -> None:
        """Raise TableError if the file is no longer what was opened."""
        state = self._state()
        if state != self._opened:
            (size, _), (old, _) = state, self._opened
            what = f"it had {old} bytes and has {size}" if size != old else "it was written to"
            raise TableError(f"{self.path}: changed while it was served: {what}; restart to serve what is there now")

    def _state(self) -> tuple[int, int]:
        try:
            stat = os.fstat(self.fd)
        except OSError as error:
            raise TableError(f"{self.path}: {error.strerror}") from error
        if stat.st_nlink == 0 and not self._deleted:
            self._deleted = True
            logger.warning("%s was deleted; its rows are still there until this process ends", self.path)
        return stat.st_size, stat.st_mtime_ns

    _deleted = True  # until opened


class FileTable:
    """Rows read where the checkpoint has them. cache: for rows that come again; None = the page cache alone."""

    def __init__(
        self, codes: StoredRows, scales: StoredRows, files: dict[Path, OpenFile], cache: RowCache | None
    ) -> None:
        self._parts = tuple((part, files[part.file]) for part in (codes, scales))
        self.cache = cache
        self.hits = self.rows_read = self.bytes_read = 0

    def values(self, rows: Tensor, serial: bool) -> Tensor:
        codes, scales = self.stored(rows.flatten())
        return engram.look_up(codes, scales, torch.arange(rows.numel()).view(rows.shape), serial)

    def stored(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        wanted = rows.numpy()
        if self.cache is None:
            codes, scales = self._read(wanted)
        else:
            codes, scales, missing = self.cache.find(wanted)
            self.hits += len(wanted) - len(missing)
            if len(missing):
                codes[missing], scales[missing] = fresh = self._read(wanted[missing])
                self.cache.keep(wanted[missing], *fresh)
        return torch.from_numpy(codes), torch.from_numpy(scales)

    def _read(self, rows: Ints) -> tuple[Bytes, Bytes]:
        codes, scales = (np.empty((len(rows), part.width), np.uint8) for part, _ in self._parts)
        for (part, file), out in zip(self._parts, (codes, scales), strict=True):
            bad, why = engram.read_rows(file.fd, part.offset, torch.from_numpy(rows), torch.from_numpy(out))
            file.check()
            if bad >= 0:
                reason = "the file ends before it" if why == errno.ENODATA else os.strerror(why)
                raise TableError(f"{part.file}: row {rows[bad]} of an Engram table could not be read: {reason}")
            self.bytes_read += out.nbytes
        self.rows_read += len(rows)
        return codes, scales
