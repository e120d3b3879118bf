"""Requests that the model cannot run are refused with their cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ced.plugin.requests import check


@pytest.mark.parametrize(
    ("fields", "ids", "cause"),
    [
        ({"image_data": ["x"]}, [1], "no vision"),
        ({"video_data": ["x"]}, [1], "no vision"),
        ({"audio_data": ["x"]}, [1], "no vision"),
        ({"input_embeds": [[0.0]]}, None, "input_embeds"),
        ({}, [1, 9], "token id 9 is the image placeholder"),
        ({}, [1, 10], "token id 10 is outside the vocabulary of 10"),
        ({}, [-1, 3], "token id -1 is outside"),
    ],
)
def test_cause_is_named(fields: dict[str, Any], ids: list[int] | None, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        check(SimpleNamespace(**fields), ids, vocab_size=10, image_token=9)


@pytest.mark.parametrize("ids", [None, [], [0, 8]])
def test_text_passes(ids: list[int] | None) -> None:
    check(SimpleNamespace(image_data=None), ids, vocab_size=10, image_token=9)
    check(SimpleNamespace(), ids, vocab_size=10, image_token=None)
