"""checkpoint/token_map.py: the classes are the publisher's, and a tokenizer of another model is refused."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from torch import Tensor

from sglang_ced.checkpoint.names import CheckpointError
from sglang_ced.checkpoint.token_map import build_token_map, token_classes
from sglang_ced.checkpoint.tokenizer import write_byte_tokenizer
from sglang_ced.config import CedConfig


@pytest.fixture
def config(golden_dir: Path) -> CedConfig:
    return CedConfig.from_dir(golden_dir / "toy8" / "model")


def test_token_map_equals_the_publishers(golden_dir: Path, golden_ops: dict[str, Tensor], config: CedConfig) -> None:
    token_map = build_token_map(golden_dir / "toy8" / "model", config)
    assert token_map.dtype is torch.int64
    assert torch.equal(token_map, golden_ops["engram/token_map"].long())
    assert int(token_map[config.engram_pad_token_id]) == int(golden_ops["engram/pad_compressed"])
    assert len(token_map.unique()) == int(golden_ops["engram/compressed_vocab_size"])


def test_ids_the_tokenizer_does_not_know_are_pad(golden_dir: Path, config: CedConfig) -> None:
    wider = dataclasses.replace(config, vocab_size=384)
    token_map = build_token_map(golden_dir / "toy8" / "model", wider)
    assert torch.equal(token_map[:320], build_token_map(golden_dir / "toy8" / "model", config))
    assert token_map[320:].tolist() == [int(token_map[2])] * 64


def test_another_number_of_classes_is_refused_with_both_numbers(golden_dir: Path, config: CedConfig) -> None:
    other = dataclasses.replace(config, engram_compressed_vocab_size=260)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: 259 token classes, .* is 260"):
        build_token_map(golden_dir / "toy8" / "model", other)


def test_missing_or_broken_tokenizer_is_named(tmp_path: Path, config: CedConfig) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        build_token_map(tmp_path, config)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        build_token_map(tmp_path, config)


def test_no_tokenizer_is_needed_without_ngram_layers(tmp_path: Path, config: CedConfig) -> None:
    plain = dataclasses.replace(config, engram_layer_ids=(), engram_num_embeddings=())
    assert torch.equal(build_token_map(tmp_path, plain), torch.arange(config.vocab_size))


def test_case_accents_and_blanks_do_not_tell_classes_apart(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, extra_merges=["é", "É", "THE", "\n\n", "\t\t", "fi", "ﬁ"])
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    classes = token_classes(tokenizer)

    def classes_of(*texts: str) -> set[int]:
        ids = [next(i for i in range(len(classes)) if tokenizer.decode([i]) == text) for text in texts]
        return {classes[i] for i in ids}

    assert len(classes_of("e", "E", "é", "É")) == 1
    assert len(classes_of("the", " the", "THE")) == 1
    assert len(classes_of("fi", "ﬁ")) == 1  # a compatibility form: one sign for two letters
    assert len(classes_of(" ", "\n", "\n\n", "\t\t", "\r")) == 1
    assert len(classes_of("a", " ", "he", "the")) == 4


def test_parts_of_characters_are_told_apart_by_their_bytes(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    classes = token_classes(Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    high_bytes = classes[3 + 0x80 : 3 + 0x100]
    assert len(set(high_bytes)) == 128
    assert not set(high_bytes) & set(classes[: 3 + 0x80])


def test_a_vocabulary_of_full_size_takes_seconds() -> None:
    alphabet = [chr(c) for c in range(0x21, 0x7F)]
    pieces = [a + b + c for a in alphabet for b in alphabet for c in alphabet[:15]][:129280]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    start = time.perf_counter()
    classes = token_classes(tokenizer)
    assert time.perf_counter() - start < 10
    assert len(classes) == 129280
