"""A table, whatever its placement, and the errors that all of them raise."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TableError(RuntimeError):
    """Rows of a table could not be had. The step that wanted them must not go on."""


class Table(Protocol):
    """One Engram layer's rows. Used by one thread at a time.

    hits: rows found in a row cache so far; rows_read, bytes_read: what came from files.
    """

    hits: int
    rows_read: int
    bytes_read: int

    def values(self, rows: Tensor, serial: bool) -> Tensor:
        """Rows int64 [T, R] -> bfloat16 [T, R D]; serial: by this thread alone. Raises TableError."""

    def stored(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows int64 [n] -> e4m3 codes uint8 [n, D], ue8m0 scales uint8 [n, D/32]. Raises TableError."""
