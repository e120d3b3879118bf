"""Accuracy by skill: `python -m training.evaluate`. Stored numbers, sparse attention, texts never trained on."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.checkpoint.token_map import build_token_map
from sglang_ced.cli.models import bundled_path
from training import fast, shape, train
from training.conversation import Example

SEED, TEXTS, AT_ONCE, REPLAYS = "evaluation", 96, 32, 6


def evaluate(model: Path, length: int, replay: bool = False) -> dict[str, list[bool]]:
    """Whether each answer in TEXTS conversations of `length` tokens is right, by skill.

    replay: of each conversation one answer counts, and is written as after a cache hit that ends up to two windows
    before it: window keys from before the last window of the hit are missing, in the decoder from before the last
    window of the question.
    """
    checkpoint = Checkpoint.open(model)
    network = fast.FastReference(
        checkpoint.config, build_token_map(model, checkpoint.config), replace(fast.QUICK, fake_quant=True)
    )
    network.load_tensors(dict(checkpoint.dequantized()))
    data = train.Data(Tokenizer.from_file(str(model / "tokenizer.json")), SEED)
    found: dict[str, list[bool]] = {}
    for part in range(TEXTS * (REPLAYS if replay else 1) // AT_ONCE):
        ids, _, examples = data.batch(f"{length} {part}", AT_ONCE, length)
        lesson = fast.Lesson()
        if replay:
            floors = [_after_a_hit(example, length, Random(f"{part} {n}")) for n, example in enumerate(examples)]
            lesson.encoder_floor, lesson.decoder_floor = torch.tensor(floors).unbind(1)
        for skill, right in train.answered(network, ids, examples, lesson).items():
            found.setdefault(skill, []).extend(right)
    return found


def _after_a_hit(example: Example, length: int, random: Random) -> tuple[int, int]:
    """Floors of encoder and decoder for one of the answers, which is then the only one of `example`."""
    whole = [answer for answer in example.answers if answer[2] <= length + 1]
    example.answers = [random.choice(whole)] if whole else []
    first = example.answers[0][1] if whole else 0
    hit = max(0, first - random.randint(1, 2 * shape.WINDOW))
    return max(0, hit - shape.WINDOW), max(0, first - shape.WINDOW)


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of a checkpoint of this training, by skill.")
    parser.add_argument("--model", type=Path, default=bundled_path("ced-tiny"))
    parser.add_argument("--length", type=int, default=256, help="tokens per text")
    parser.add_argument("--replay", action="store_true", help="one answer of each text, as after a cache hit")
    options = parser.parse_args()
    print("| skill | right | answers |\n|---|---|---|")
    for skill, right in sorted(evaluate(options.model, options.length, options.replay).items()):
        print(f"| {skill} | {100 * sum(right) / len(right):.1f} % | {len(right)} |")


if __name__ == "__main__":
    main()
