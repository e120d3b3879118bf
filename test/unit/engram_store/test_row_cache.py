"""The row cache gives a row's own bytes or says that it has none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ced.engram_store.row_cache import MIN_ROWS, RowCache

WIDTHS = (32, 1)
BUDGET = MIN_ROWS * (sum(WIDTHS) + 8)
# Few residues, so that rows share places.
ROWS = st.lists(
    st.builds(lambda place, turn: place + MIN_ROWS * turn, st.integers(0, 3), st.integers(0, 3)), min_size=1
)


def content(rows: np.ndarray, width: int) -> np.ndarray:
    return (rows[:, None] // MIN_ROWS * 16 + rows[:, None] % MIN_ROWS + np.arange(width)).astype(np.uint8)


@given(steps=st.lists(ROWS, min_size=1, max_size=6))
def test_a_row_found_has_its_own_bytes(steps: list[list[int]]) -> None:
    cache = RowCache(BUDGET, WIDTHS)
    for step in steps:
        rows = np.array(step)
        codes, scales, missing = cache.find(rows)
        found = np.setdiff1d(np.arange(len(rows)), missing)
        assert np.array_equal(codes[found], content(rows[found], 32))
        assert np.array_equal(scales[found], content(rows[found], 1))
        cache.keep(rows[missing], content(rows[missing], 32), content(rows[missing], 1))
        if len(missing):
            assert len(cache.find(rows[missing])[2]) < len(missing), "the newest of a place stays"


def test_rows_without_a_rival_are_all_found() -> None:
    cache, rows = RowCache(BUDGET, WIDTHS), np.arange(MIN_ROWS) * 3
    assert len(cache.find(rows)[2]) == MIN_ROWS
    rows = rows[np.unique(rows % cache.places, return_index=True)[1]]
    cache.keep(rows, content(rows, 32), content(rows, 1))
    assert len(cache.find(rows)[2]) == 0


def test_too_small_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=f"hold {MIN_ROWS - 1} rows of 41; a row cache has at least {MIN_ROWS}"):
        RowCache(BUDGET - 1, WIDTHS)
