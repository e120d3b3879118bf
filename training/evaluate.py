"""Accuracy by skill: `python -m training.evaluate`. Stored numbers, sparse attention, texts never trained on."""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer
from torch import Tensor

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.checkpoint.token_map import build_token_map
from sglang_ced.cli.models import bundled_path
from training import fast, shape, train
from training.conversation import Example

SEED, TEXTS, REPLAYS, AT_ONCE = "evaluation", 96, 576, 32
KEPT = Path(__file__).parent / "results" / "evaluation.json"  # what the page on ced-tiny shows

Found: TypeAlias = dict[str, list[bool]]


class Exam:
    """A checkpoint, and texts of `length` tokens that it was never trained on."""

    def __init__(self, model: Path, length: int) -> None:
        checkpoint = Checkpoint.open(model)
        numerics = replace(fast.QUICK, fake_quant=True)
        self.length = length
        self.network = fast.FastReference(checkpoint.config, build_token_map(model, checkpoint.config), numerics)
        self.network.load_tensors(dict(checkpoint.dequantized()))
        self.data = train.Data(Tokenizer.from_file(str(model / "tokenizer.json")), SEED)

    def exact(self) -> Found:
        """Whether each answer in TEXTS conversations is right, by skill."""
        found: Found = {}
        for part in range(TEXTS // AT_ONCE):
            ids, _, examples = self.data.batch(f"{self.length} {part}", AT_ONCE, self.length)
            self._add(found, ids, examples, fast.Lesson())
        return found

    def exact_and_replayed(self) -> tuple[Found, Found]:
        """One answer of each of REPLAYS conversations: written exactly, and as after a cache hit.

        The hit ends up to two windows before the answer: window keys from before the last window of the hit are
        missing, in the decoder from before the last window of the question.
        """
        exact: Found = {}
        replayed: Found = {}
        for part in range(REPLAYS // AT_ONCE):
            ids, _, examples = self.data.batch(f"{self.length} {part}", AT_ONCE, self.length)
            floors = [_after_a_hit(example, self.length, Random(f"{part} {n}")) for n, example in enumerate(examples)]
            encoder, decoder = torch.tensor(floors).unbind(1)
            self._add(exact, ids, examples, fast.Lesson())
            self._add(replayed, ids, examples, fast.Lesson(encoder_floor=encoder, decoder_floor=decoder))
        return exact, replayed

    def _add(self, found: Found, ids: Tensor, examples: list[Example], lesson: fast.Lesson) -> None:
        for skill, right in train.answered(self.network, ids, examples, lesson).items():
            found.setdefault(skill, []).extend(right)


def _after_a_hit(example: Example, length: int, random: Random) -> tuple[int, int]:
    """Floors of encoder and decoder for one of the answers, which is then the only one of `example`."""
    whole = [answer for answer in example.answers if answer[2] <= length + 1]
    example.answers = [random.choice(whole)] if whole else []
    first = example.answers[0][1] if whole else 0
    hit = max(0, first - random.randint(1, 2 * shape.WINDOW))
    return max(0, hit - shape.WINDOW), max(0, first - shape.WINDOW)


def keep(model: Path, length: int, replay: bool, columns: tuple[Found, ...]) -> None:
    """Put the counts into KEPT: skill -> right answers, by column, and answers. Those of other weights go."""
    sha256 = hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    kept: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    if kept.get("sha256") != sha256:
        kept = {"sha256": sha256, "exact": {}, "replay": {}}
    counts = {
        skill: [*(sum(column[skill]) for column in columns), len(answers)]
        for skill, answers in sorted(columns[0].items())
    }
    kept["replay" if replay else "exact"][str(length)] = counts
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of a checkpoint of this training, by skill.")
    parser.add_argument("--model", type=Path, default=bundled_path("ced-tiny"))
    parser.add_argument("--length", type=int, default=256, help="tokens per text")
    parser.add_argument("--replay", action="store_true", help="one answer of each text, as after a cache hit")
    parser.add_argument("--keep", action="store_true", help=f"put the counts into {KEPT.relative_to(KEPT.parents[2])}")
    options = parser.parse_args()
    exam = Exam(options.model, options.length)
    columns = exam.exact_and_replayed() if options.replay else (exam.exact(),)
    print("| skill | " + ("right | after a hit" if options.replay else "right") + " | answers |")
    print("|---" * (len(columns) + 2) + "|")
    for skill, answers in sorted(columns[0].items()):
        shares = " | ".join(f"{100 * sum(column[skill]) / len(answers):.1f} %" for column in columns)
        print(f"| {skill} | {shares} | {len(answers)} |")
    if options.keep:
        keep(options.model, options.length, options.replay, columns)


if __name__ == "__main__":
    main()
