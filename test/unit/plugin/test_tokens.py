"""Token ids of a request: prompt, output and the rows that the batch runs, as one sequence."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ced.plugin.tokens import RequestTokens

ids = st.lists(st.integers(0, 1000), max_size=8)


@given(prompt=ids, output=ids, new=ids, data=st.data())
def test_reads_like_a_list(prompt: list[int], output: list[int], new: list[int], data: st.DataObject) -> None:
    prefix = data.draw(st.integers(0, len(prompt) + len(output)))
    expected = (prompt + output)[:prefix] + new
    tokens = RequestTokens(array("q", prompt), array("q", output), prefix, new)
    assert len(tokens) == len(expected)
    assert list(tokens) == expected
    cut = data.draw(st.slices(len(expected)))
    assert tokens[cut] == expected[cut]
    for position in range(-len(expected), len(expected)):
        assert tokens[position] == expected[position]


def test_the_newest_token_comes_from_the_batch() -> None:
    """With overlap the host does not have it yet."""
    assert list(RequestTokens([1, 2], [3], prefix=3, new=[4])) == [1, 2, 3, 4]


def test_unknown_ids_before_the_batch_are_an_error() -> None:
    with pytest.raises(ValueError, match="the host knows 3 token ids, the batch starts at 5"):
        RequestTokens([1, 2], [3], prefix=5, new=[4])


def test_positions_outside_are_an_error() -> None:
    with pytest.raises(IndexError):
        RequestTokens([1], [], prefix=1, new=[2])[2]
