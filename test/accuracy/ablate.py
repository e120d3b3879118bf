"""What each mechanism of the model is for: accuracy by skill without it. Run by `python test/accuracy/ablate.py`.

Runs the offline engine, in exact mode and without a server. An answer counts where all of its tokens, the end
included, are the likeliest ones given those before them, which is when greedy decoding writes it. Ends with 0 if each
mechanism's own skill falls without it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import items
import paired
import torch
from tokenizers import Tokenizer
from torch import Tensor

from sglang_ced.checkpoint.tokenizer import EOS
from sglang_ced.cli.models import bundled_path
from sglang_ced.engine.offline import OfflineEngine
from sglang_ced.model.context import HalfContext

SKILLS = ("recall", "pattern", "fact", "sum", "edit")
NEAR, FAR = "recall, near", "recall, far"
NEAR_FACTS = 3  # the fact asked for is among the last so many: as near as a window reaches from the end of the notes
SIGNIFICANT = 0.01
KEPT = Path(__file__).parents[2] / "training" / "results" / "ablations.json"  # what the page on ced-tiny shows
MADE_FOR = {"global KV": FAR, "indexer": FAR, "Engram": "fact", "window": "pattern"}

Found = dict[str, dict[str, list[bool]]]  # mechanism disabled -> line of the table -> answers, in order


# -- mechanisms -------------------------------------------------------------------------------------------------------


def nothing(engine: OfflineEngine) -> None:
    """The model as it is."""


def global_kv(engine: OfflineEngine) -> None:
    """No layer reads global KV."""
    for block in engine.model.blocks:
        attention = block.attention
        attention.selector = None
        attention.plan = replace(attention.plan, kv_source=None, index_source=None)


def indexer(engine: OfflineEngine) -> None:
    """Layers read the newest groups instead of the ones with the best scores."""
    for block in engine.model.blocks:
        if block.attention.selector is not None:
            block.attention.selector = Newest(block.attention.plan.ratio, engine.config.index_topk)


def engram(engine: OfflineEngine) -> None:
    """No n-gram memory."""
    for block in engine.model.blocks:
        block.engram = None


def window(engine: OfflineEngine) -> None:
    """Of its window, each row sees its own key alone."""
    engine.state._shape = replace(engine.state._shape, window=1)


class Newest:
    """Stands in for `model.attention.Selector`."""

    def __init__(self, ratio: int, top_k: int) -> None:
        self.ratio, self.top_k = ratio, top_k

    def select(self, x: Tensor, q_lora: Tensor, context: HalfContext) -> Tensor:
        out = torch.full((len(x), self.top_k), -1, dtype=torch.int64)
        for reach in context.reach:
            rows = slice(reach.first, reach.last)
            visible = ((context.positions[rows] + 1) // self.ratio)[:, None]
            ids = (visible - self.top_k).clamp_min(0) + torch.arange(self.top_k)
            slots = reach.groups[self.ratio]
            if len(slots):
                out[rows] = torch.where(ids < visible, slots[ids.clamp_max(len(slots) - 1)], -1)
        return out


MECHANISMS: dict[str, Callable[[OfflineEngine], None]] = {
    "none": nothing,
    "global KV": global_kv,
    "indexer": indexer,
    "Engram": engram,
    "window": window,
}


# -- measuring --------------------------------------------------------------------------------------------------------


def is_right(engine: OfflineEngine, prompt: list[int], answer: list[int]) -> bool:
    """Whether greedy decoding of `prompt` writes `answer`."""
    request = engine.start(prompt + answer[:-1])
    try:
        rows = engine.step([(request, request.prompt_len)], [len(prompt) - 1])[0]
    finally:
        engine.finish(request)
    return rows.argmax(-1).tolist() == answer


def column(item: dict[str, Any]) -> str:
    """The line of the table that an item counts in."""
    skill: str = item["skill"]
    return skill if skill != "recall" else NEAR if item["distance"] <= NEAR_FACTS else FAR


def measure(model: Path, questions: Iterable[dict[str, Any]]) -> Found:
    """Answers of the whole model and of each one with a mechanism disabled."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    asked = [(column(item), encode(item["prompt"]), encode(item["answer"] + EOS)) for item in questions]
    found: Found = {}
    for mechanism, disable in MECHANISMS.items():
        engine = OfflineEngine.from_pretrained(model, max_requests=1, max_tokens=4096)
        disable(engine)
        answers = found[mechanism] = defaultdict(list)
        for name, prompt, answer in asked:
            answers[name].append(is_right(engine, prompt, answer))
    return found


def falls(whole: Sequence[bool], ablated: Sequence[bool]) -> bool:
    """Whether answers were lost, by McNemar's exact test."""
    lost = sum(one and not two for one, two in zip(whole, ablated, strict=True))
    gained = sum(two and not one for one, two in zip(whole, ablated, strict=True))
    return lost > gained and paired.mcnemar(lost, gained) < SIGNIFICANT


def fallen(found: Found) -> dict[str, list[str]]:
    """Mechanism disabled -> columns that fall."""
    whole = found["none"]
    return {
        mechanism: [name for name in whole if falls(whole[name], answers[name])]
        for mechanism, answers in found.items()
        if mechanism != "none"
    }


def table(found: Found) -> str:
    """Skills by mechanisms, in per cent; the first column of numbers is the whole model. Below, what falls."""
    lines = ["| disabled | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for name, whole in found["none"].items():
        shares = (f"{sum(found[mechanism][name]) / len(whole):.1%}" for mechanism in found)
        lines.append(f"| {name} ({len(whole)}) | " + " | ".join(shares) + " |")
    lines.append("")
    for mechanism, names in fallen(found).items():
        own, others = MADE_FOR[mechanism], [name for name in names if name != MADE_FOR[mechanism]]
        effect = "falls" if own in names else "DOES NOT FALL"
        lines.append(f"- without {mechanism}, {own} {effect}; of the others, {', '.join(others) or 'none'} fall")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Accuracy by skill with one mechanism disabled.")
    parser.add_argument("--model", type=Path, help="checkpoint directory; default: the bundled ced-tiny")
    parser.add_argument("--limit", type=int, help="only the first so many questions of each skill, for a look")
    parser.add_argument("--keep", action="store_true", help=f"put the counts into {KEPT.relative_to(KEPT.parents[2])}")
    options = parser.parse_args()
    questions = [item for skill in SKILLS for item in items.read(skill)[: options.limit]]
    found = measure(options.model or bundled_path("ced-tiny"), questions)
    print(table(found))
    if options.keep:
        counts = {m: {name: [sum(right), len(right)] for name, right in of.items()} for m, of in found.items()}
        KEPT.write_text(json.dumps(counts, indent=1) + "\n")
    return 0 if all(MADE_FOR[mechanism] in names for mechanism, names in fallen(found).items()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
