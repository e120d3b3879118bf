"""Token classes for the n-gram hash: ids whose text reads the same share a class (architecture.md 5.1)."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from sglang_ced.checkpoint.names import CheckpointError
from sglang_ced.config import CedConfig

REPLACEMENT = "\ufffd"
# Stands in for a lone space, which the strip would otherwise take away. From the private use area.
_LONE_SPACE = "\ue000"


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def token_classes(tokenizer: Tokenizer) -> list[int]:
    """Class of every id below len(tokenizer), numbered by first appearance."""
    ids = range(tokenizer.get_vocab_size(with_added_tokens=True))
    texts = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    normalizer, classes, out = _normalizer(), dict[str, int](), []
    for i, text in zip(ids, texts, strict=True):
        # Part of a character has no text of its own: then the piece of the vocabulary is the key.
        piece = tokenizer.id_to_token(i) if REPLACEMENT in text else None
        key = piece if piece is not None else normalizer.normalize_str(text) or text
        out.append(classes.setdefault(key, len(classes)))
    return out


def build_token_map(path: str | os.PathLike[str], config: CedConfig) -> Tensor:
    """int64 [vocab_size]: the class of every token id, from `<path>/tokenizer.json`.

    The class of "nothing here" (before the text, or an image) is `map[config.engram_pad_token_id]`. Ids that
    the tokenizer does not know, as in a vocabulary padded to a round size, get it too: no text has them.
    Without n-gram layers no tokenizer is read and every id is its own class.

    Raises CheckpointError if the tokenizer is missing or unreadable, or its classes are not as many as the
    config says.
    """
    if not config.engram_layer_ids:
        return torch.arange(config.vocab_size)
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{file}: missing; the n-gram layers {list(config.engram_layer_ids)} need it")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no type of its own
        raise CheckpointError(f"{file}: not a tokenizer ({error})") from error
    classes = token_classes(tokenizer)
    count, wanted = len(set(classes)), config.engram_compressed_vocab_size
    if count != wanted:
        raise CheckpointError(f"{file}: {count} token classes, but engram_compressed_vocab_size is {wanted}")
    if config.engram_pad_token_id >= len(classes):
        raise CheckpointError(f"{file}: engram_pad_token_id {config.engram_pad_token_id} is not one of its ids")
    out = torch.full((config.vocab_size,), classes[config.engram_pad_token_id])
    known = min(len(classes), config.vocab_size)
    out[:known] = torch.tensor(classes[:known])
    return out
