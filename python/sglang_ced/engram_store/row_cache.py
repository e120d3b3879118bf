"""Rows kept in memory: 264 bytes each for the released shape, where the page cache keeps 4096 for one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

MIN_ROWS = 4096


def places(budget: int, widths: tuple[int, int]) -> int:
    """Rows that `budget` bytes hold. Raises ValueError for fewer than MIN_ROWS."""
    row = sum(widths) + 8
    count = budget // row
    if count < MIN_ROWS:
        raise ValueError(f"{budget} bytes hold {count} rows of {row}; a row cache has at least {MIN_ROWS}")
    return count


class RowCache:
    """Direct-mapped: a row has one place, and the newest row of a place stays. Row ids are hashes already.

    All of its memory is taken at once: numpy asks for huge pages, and the first requests should not wait for them.
    """

    def __init__(self, budget: int, widths: tuple[int, int]) -> None:
        """widths: bytes of a row's codes and of its scales. Raises what `places` raises."""
        self.places = places(budget, widths)
        self._rows = np.full(self.places, -1)
        self._parts = tuple(np.full((self.places, width), 0, np.uint8) for width in widths)

    def find(self, rows: Ints) -> tuple[Bytes, Bytes, Ints]:
        """rows [n] -> codes [n, ..] and scales [n, ..] of which those at the third, [m], are missing."""
        at = rows % self.places
        missing = np.flatnonzero(self._rows[at] != rows)
        codes, scales = (part.take(at, axis=0) for part in self._parts)
        return codes, scales, missing

    def keep(self, rows: Ints, codes: Bytes, scales: Bytes) -> None:
        """Put rows [m] in their places. Of rows that share one, exactly one stays, with its own bytes."""
        at = rows % self.places
        self._rows[at] = rows
        stays = np.flatnonzero(self._rows[at] == rows)
        for part, fresh in zip(self._parts, (codes, scales), strict=True):
            part[at[stays]] = fresh[stays]
