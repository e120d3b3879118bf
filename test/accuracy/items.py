"""The questions of the gates, made from what `ced-tiny` is taught. `python test/accuracy/items.py` writes data/.

A text is a conversation in the published chat format that ends where the model is to answer. Four questions share one
beginning (`group`), so that three of them find it in the prefix cache. The random generator is seeded with words that
training does not use; the facts of `fact` are the same in every text ever made, and are to be known by heart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `training` is not installed

from calls import call_line
from training.conversation import ASSISTANT, NO_THINK, NOTED, USER

from sglang_ced.checkpoint.tokenizer import BOS, EOS
from training import lexicon, skills

DATA = Path(__file__).parent / "data"
SEED = "accuracy gates 1"
PER_GROUP = 4  # questions on one beginning
# recall: facts told, and the share of filler between them; each about twice as many tokens as the one before, up to 512
NOTES = ((9, 0.0), (22, 0.0), (44, 0.0), (38, 0.5))
RECALL_GROUPS, OTHER_GROUPS, TOOL_GROUPS, CHOICE_GROUPS = 12, 48, 20, 4  # recall: for each of NOTES

Item = dict[str, Any]


def said(user: str, answer: str) -> str:
    """One turn that is over."""
    return f"{USER}{user}{ASSISTANT}{NO_THINK}{answer}{EOS}"


def asked(user: str) -> str:
    """A turn that the model is to answer."""
    return f"{USER}{user}{ASSISTANT}{NO_THINK}"


def recall() -> Iterator[Item]:
    """Who has what: questions over the whole distance of each length of notes."""
    for facts, filler in NOTES:
        for group in range(RECALL_GROUPS):
            random = Random(f"{SEED} recall {facts} {filler} {group}")
            notes = skills.Notes(random)
            begin = BOS + said(notes.tell(facts, filler), NOTED)
            for number, name in enumerate(random.sample(notes.owners, PER_GROUP)):
                turn = notes.ask(name)
                key = f"recall-{facts}-{filler}-{group}"
                yield _item(key, number, "recall", begin + asked(turn.user), turn.answer) | {
                    "facts": facts,
                    "filler": filler,
                    "distance": turn.distance,
                }


def simple(skill: str) -> Iterator[Item]:
    """pattern, fact, sum or edit, after notes and two questions on them."""
    for group in range(OTHER_GROUPS):
        random = Random(f"{SEED} {skill} {group}")
        notes = skills.Notes(random)
        begin = BOS + said(notes.tell(random.randint(8, 20)), NOTED)
        begin += "".join(said(turn.user, turn.answer) for turn in (notes.ask(), notes.ask()))
        for number in range(PER_GROUP):
            turn = skills.SIMPLE[skill](random)
            yield _item(f"{skill}-{group}", number, skill, begin + asked(turn.user), turn.answer)


def tool() -> Iterator[Item]:
    """Requests that need a tool, for the chat endpoint: `tools` as JSON text, the answer as calls.py writes it."""
    for group in range(TOOL_GROUPS):
        random = Random(f"{SEED} tool {group}")
        tools = skills.tools(random, 2)
        for number in range(PER_GROUP):
            request = random.choice(tools).use(random)[0]
            answer = "\n".join(call_line(name, arguments) for name, arguments in request.calls)
            item = _item(f"tool-{group}", number, "tool", request.user, answer)
            yield item | {"tools": json.dumps([each.schema() for each in tools])}


def choice() -> Iterator[Item]:
    """Some of the recall questions with four answers to weigh."""
    for facts, filler in NOTES:
        for group in range(CHOICE_GROUPS):
            random = Random(f"{SEED} choice {facts} {filler} {group}")
            notes = skills.Notes(random)
            begin = BOS + said(notes.tell(facts, filler), NOTED)
            for number, name in enumerate(random.sample(notes.owners, PER_GROUP)):
                turn = notes.ask(name)
                right = notes.things[name]
                things = random.sample([thing for thing in lexicon.THINGS if thing != right], 3)
                choices = [turn.answer, *(turn.answer.replace(f" {right}.", f" {thing}.") for thing in things)]
                random.shuffle(choices)
                item = _item(
                    f"choice-{facts}-{filler}-{group}", number, "choice", begin + asked(turn.user), turn.answer
                )
                yield item | {"choices": choices, "right": choices.index(turn.answer)}


def _item(group: str, number: int, skill: str, prompt: str, answer: str) -> Item:
    return {"id": f"{group}-{number}", "group": group, "skill": skill, "prompt": prompt, "answer": answer}


FILES: dict[str, Callable[[], Iterator[Item]]] = {
    "recall": recall,
    "pattern": lambda: simple("pattern"),
    "fact": lambda: simple("fact"),
    "sum": lambda: simple("sum"),
    "edit": lambda: simple("edit"),
    "tool": tool,
    "choice": choice,
}


def text(name: str) -> str:
    """What data/NAME.jsonl holds."""
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in FILES[name]())


def read(name: str) -> list[Item]:
    """The items of data/NAME.jsonl."""
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def main() -> None:
    for name in FILES:
        (DATA / f"{name}.jsonl").write_text(text(name), encoding="utf-8")


if __name__ == "__main__":
    main()
