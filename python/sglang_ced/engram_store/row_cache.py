"""Rows kept in memory: 264 bytes each for the released shape, where the page cache keeps 4096 for one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

MIN_ROWS = 4096


class RowCache:
    """Direct-mapped: a row has one place, and the newest row of a place stays. Row ids are hashes already.

    Memory is taken as places are filled, up to `budget` bytes.
    """

    def __init__(self, budget: int, widths: tuple[int, int]) -> None:
        """widths: bytes of a row's codes and of its scales. Raises ValueError for fewer than MIN_ROWS rows."""
        row = sum(widths) + 8
        self.places = budget // row
        if self.places < MIN_ROWS:
            raise ValueError(f"{budget} bytes hold {self.places} rows of {row}; a row cache has at least {MIN_ROWS}")
        self._rows = np.zeros(self.places, np.int64)  # row + 1; 0 = free, so that untouched pages stay untouched
        self._parts = tuple(np.empty((self.places, width), np.uint8) for width in widths)

    def find(self, rows: Ints) -> tuple[Bytes, Bytes, Ints]:
        """rows [n] -> codes [n, ..] and scales [n, ..] of which those at the third, [m], are missing."""
        places = rows % self.places
        missing = np.flatnonzero(self._rows[places] != rows + 1)
        codes, scales = (part.take(places, axis=0) for part in self._parts)
        return codes, scales, missing

    def keep(self, rows: Ints, codes: Bytes, scales: Bytes) -> None:
        """Put rows [m] in their places. Of rows that share one, exactly one stays, with its own bytes."""
        places = rows % self.places
        self._rows[places] = rows + 1
        stays = np.flatnonzero(self._rows[places] == rows + 1)
        for part, fresh in zip(self._parts, (codes, scales), strict=True):
            part[places[stays]] = fresh[stays]
