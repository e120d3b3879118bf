"""Accuracy by skill: `python -m training.evaluate`. Exact mode, stored numbers, texts never trained on."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.checkpoint.token_map import build_token_map
from sglang_ced.cli.models import bundled_path
from training import fast, train

SEED, TEXTS, AT_ONCE = "evaluation", 96, 32


def evaluate(model: Path, length: int) -> dict[str, list[bool]]:
    """Whether each answer in TEXTS conversations of `length` tokens is right, by skill."""
    checkpoint = Checkpoint.open(model)
    network = fast.FastReference(
        checkpoint.config, build_token_map(model, checkpoint.config), replace(fast.QUICK, fake_quant=True)
    )
    network.load_tensors(dict(checkpoint.dequantized()))
    data = train.Data(Tokenizer.from_file(str(model / "tokenizer.json")), SEED)
    found: dict[str, list[bool]] = {}
    for part in range(TEXTS // AT_ONCE):
        ids, _, examples = data.batch(f"{length} {part}", AT_ONCE, length)
        for skill, right in train.answered(network, ids, examples, sparse=True).items():
            found.setdefault(skill, []).extend(right)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy of a checkpoint of this training, by skill.")
    parser.add_argument("--model", type=Path, default=bundled_path("ced-tiny"))
    parser.add_argument("--length", type=int, default=256, help="tokens per text")
    options = parser.parse_args()
    print("| skill | right | answers |\n|---|---|---|")
    for skill, right in sorted(evaluate(options.model, options.length).items()):
        print(f"| {skill} | {100 * sum(right) / len(right):.1f} % | {len(right)} |")


if __name__ == "__main__":
    main()
