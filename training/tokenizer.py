"""The tokenizer of `ced-tiny`: byte-level BPE learnt from its own text, digits apart, published special tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from sglang_ced.checkpoint.tokenizer import BOS, EOS, LEADING_SPECIALS, PAD, TRAILING_SPECIALS
from training import conversation, lexicon, skills

VOCABULARY = 1280
SEED = 1


def corpus() -> Iterator[str]:
    """Text of all kinds, the same on every machine: every word of the lexicon."""
    words = {w for value in vars(lexicon).values() if isinstance(value, tuple) for w in value}
    for word in sorted(words - set(lexicon.FILLER)):
        yield from [f"{word} {word}" if word in lexicon.FIRST_NAMES else f"; {word}"] * 200
    system = conversation.system_text()
    random = Random(SEED)
    for _ in range(300):
        tools = skills.tools(random, 2)
        notes = skills.Notes(random)
        yield notes.tell(10, 0.3)
        yield from (maker(random).user for maker in skills.SIMPLE.values())
        yield from (maker(random).answer for maker in skills.SIMPLE.values())
        yield system(tools, random.random() < 0.5)
        for turn in (turn for tool in tools for turn in tool.use(random)):
            yield turn.user + conversation.call_text(turn.calls) + turn.answer
        yield notes.ask().user + conversation.NOTED


def train() -> Tokenizer:
    """A tokenizer with VOCABULARY ids: leading special tokens, bytes, merges, trailing special tokens."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = (*LEADING_SPECIALS, *TRAILING_SPECIALS)
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - len(TRAILING_SPECIALS),
        special_tokens=list(LEADING_SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = (_without(piece, specials) for piece in corpus())
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def _without(text: str, specials: tuple[str, ...]) -> str:
    for token in specials:
        text = text.replace(token, "\n")
    return text


def write(directory: str | os.PathLike[str]) -> Tokenizer:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer = train()
    tokenizer.save(str(Path(directory) / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    file = Path(directory) / "tokenizer_config.json"
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return tokenizer
