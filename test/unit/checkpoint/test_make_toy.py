"""The bundled miniature: small, whole, and what its script makes."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sglang_ced.checkpoint.make_toy import make_toy, unreadable_ids
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.checkpoint.token_map import build_token_map


@pytest.fixture
def bundled() -> Path:
    return Path(str(files("sglang_ced") / "assets" / "ced-toy"))


def test_bundled_miniature_is_what_its_script_makes(bundled: Path, tmp_path: Path) -> None:
    make_toy(tmp_path / "toy")
    made, shipped = ({f.name: f.read_bytes() for f in path.iterdir()} for path in (tmp_path / "toy", bundled))
    assert made.keys() == shipped.keys()
    assert [name for name in made if made[name] != shipped[name]] == []


def test_bundled_miniature_is_small_and_has_every_mechanism(bundled: Path) -> None:
    assert sum(f.stat().st_size for f in bundled.iterdir()) < 2_500_000
    assert len(list(bundled.glob("model-*.safetensors"))) == 2
    config = Checkpoint.open(bundled).config
    assert {plan.mode for plan in config.layers} == {"window", "full", "reindex", "reuse"}
    assert [plan.index for plan in config.layers if plan.has_engram] == [1, 3]
    assert (config.linear_format, config.expert_format) == ("fp8", "fp4")
    assert (config.vocab_size, config.max_position_embeddings, config.sliding_window) == (512, 8192, 128)
    assert config.unknown_fields == ()


def test_bundled_tokenizer_fits_the_config(bundled: Path) -> None:
    config = Checkpoint.open(bundled).config
    token_map = build_token_map(bundled, config)
    assert len(token_map.unique()) == config.engram_compressed_vocab_size
    tokenizer = Tokenizer.from_file(str(bundled / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert tokenizer.id_to_token(config.image_token_id or 0) == "<｜deepseek_image｜>"


def test_unreadable_ids_have_no_logit_and_others_do(bundled: Path) -> None:
    silent = unreadable_ids(Tokenizer.from_file(str(bundled / "tokenizer.json")))
    head = Checkpoint.open(bundled).tensor("head.weight").float().abs().sum(1)
    assert [i for i, weight in enumerate(head.tolist()) if weight == 0] == silent
    assert 1 not in silent  # a text may end
    assert {0, 2, 510, 511} <= set(silent)
