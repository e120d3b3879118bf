"""checkpoint/tokenizer.py: any text survives, and the special tokens are where the published ones are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sglang_ced.checkpoint.tokenizer import (
    BOS,
    EOS,
    FRAGMENTS,
    IMAGE,
    LEADING_SPECIALS,
    NOISE,
    PAD,
    TRAILING_SPECIALS,
    write_byte_tokenizer,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    assert write_byte_tokenizer(path) == 512
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@given(text=st.text(max_size=60))
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_have_the_published_ids_and_are_one_token(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(t) for t in (BOS, EOS, PAD)] == [0, 1, 2]
    assert [tokenizer.token_to_id(t) for t in (IMAGE, NOISE)] == [510, 511]
    for token in (*LEADING_SPECIALS, *TRAILING_SPECIALS):
        assert tokenizer.encode(f"a{token}b").tokens == ["a", token, "b"]


def test_every_fragment_is_one_token(tokenizer: Tokenizer) -> None:
    assert [f for f in FRAGMENTS if len(tokenizer.encode(f.replace("_", " ")).ids) != 1] == []


def test_more_fragments_make_more_ids(tmp_path: Path) -> None:
    assert write_byte_tokenizer(tmp_path, extra_merges=["qz", "the"]) == 513
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 513
    assert tokenizer.encode("qz").tokens == ["qz"]
    assert tokenizer.token_to_id(NOISE) == 512


def test_transformers_reads_it_the_same_way(directory: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    text = f"{BOS}<｜User｜>Grüße, 世界 👋🏽!\n\n  end<｜Assistant｜><think>"
    assert fast.encode(text, add_special_tokens=False) == tokenizer.encode(text).ids
    assert fast.decode(tokenizer.encode(text).ids) == text
    assert (fast.bos_token_id, fast.eos_token_id, fast.pad_token_id) == (0, 1, 2)


def test_tokenizer_config_is_valid_json(directory: Path) -> None:
    settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
