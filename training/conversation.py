"""Conversations of `ced-tiny` as token ids, in the published chat format, with the answers marked.

Turns of all skills are mixed in one conversation, so that facts are asked for at every distance and an answer has few
tokens between it and the next: a sequence is mostly signal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tokenizers import Tokenizer

from sglang_ced.checkpoint.tokenizer import BOS, EOS, IMAGE
from training import lexicon, skills
from training.skills import Turn

USER, ASSISTANT, SYSTEM = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>"
THINK, NO_THINK, DSML = "<think>", "</think>", "｜DSML｜"
NOTED = "Noted."
# How often each kind of turn comes; `tell` adds facts. broad: once recall is learnt. even: once all is, against what
# drills of tools make it forget.
MIXES = {
    "recall": {"recall": 8.0, "fact": 3.0, "sum": 3.0, "pattern": 2.0, "edit": 3.0, "chat": 0.7, "tell": 2.0},
    "broad": {"recall": 4.0, "fact": 6.0, "sum": 5.0, "pattern": 2.0, "edit": 5.0, "chat": 0.7, "tell": 2.0},
    "even": {"recall": 4.0, "fact": 5.0, "sum": 4.0, "pattern": 6.0, "edit": 6.0, "chat": 0.7, "tell": 2.0},
}
# Skills whose answer is an n-gram's, and the token of the answer that is: "A pilot." and "32".
BY_HEART = {"fact": 1, "sum": 0}
FOR_SCHEMAS = 448  # tokens of a text in which a system turn with tools leaves room for calls
SEVERAL = 0.3  # share of recall questions that ask for up to three facts at once

SystemText = Callable[[Sequence[skills.Tool], bool], str]


@dataclass
class Example:
    """ids of one conversation; `answers`: (skill, first, end) of every answer, its end-of-text token included.

    cues: (row, place) where the next token of a row is known by heart, from the n-gram that ends at the place. copies:
    (row, place) where the next token of a row is that at the place.
    """

    ids: list[int] = field(default_factory=list)
    answers: list[tuple[str, int, int]] = field(default_factory=list)
    cues: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Writer:
    """Renders turns of one conversation. system_text gives the system turn for tools and thinking (see `system`)."""

    def __init__(self, tokenizer: Tokenizer, system_text: SystemText) -> None:
        self.tokenizer, self.system_text = tokenizer, system_text

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def start(self, tools: Sequence[skills.Tool] = (), thinking: bool = False) -> Example:
        text = BOS + (self.system_text(tools, thinking) if tools or thinking else "")
        return Example(self.encode(text))

    def add(self, example: Example, turn: Turn, thinking: bool = False) -> None:
        """Append the question, and the answer as what is to be learnt."""
        answer = call_text(turn.calls) if turn.calls else turn.answer
        begin = len(example.ids) + 1
        example.ids += self.encode(USER + turn.user)
        asked = len(example.ids)
        example.ids += self.encode(ASSISTANT + (THINK if thinking else NO_THINK))
        first = len(example.ids)
        if turn.skill in BY_HEART and not thinking:
            example.cues.append((first - 1 + BY_HEART[turn.skill], asked - 2))  # before the question mark
        example.ids += self.encode((NO_THINK if thinking else "") + answer + EOS)
        example.answers.append((turn.skill, first, len(example.ids)))
        if turn.calls:
            example.copies += self._copies(example.ids, begin, asked, first)

    def _copies(self, ids: list[int], begin: int, asked: int, first: int) -> Iterator[tuple[int, int]]:
        """Which tokens of a call, from `first` on, are those of the request at begin..asked, in the same order."""
        words = [self.tokenizer.decode([token]).strip() for token in ids]
        request = [place for place in range(begin, asked) if words[place] not in ("", "Use", "with", "and")]
        for at in range(first, len(ids)):
            if request and words[at] == words[request[0]]:
                yield at - 1, request.pop(0)


def call_text(calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Tool calls in the model's tag syntax."""
    lines = [f"\n\n<{DSML} calls>"]
    for name, arguments in calls:
        lines.append(f'<{DSML} invoke name="{name}">')
        for parameter, value in arguments.items():
            is_text = isinstance(value, str)
            shown = value if is_text else json.dumps(value)
            lines.append(
                f'<{DSML} parameter name="{parameter}" string="{str(is_text).lower()}">{shown}</{DSML} parameter>'
            )
        lines.append(f"</{DSML} invoke>")
    return "\n".join([*lines, f"</{DSML} calls>"])


def system_text() -> SystemText:
    """The system turn as the publisher's renderer writes it (package `deepseek_recipe`, which comes with SGLang)."""
    import deepseek_recipe

    special = deepseek_recipe.SpecialTokens(image=IMAGE)
    options = deepseek_recipe.ConversionOptions().with_special_tokens(special)
    encoding = deepseek_recipe.DeepseekV41Encoding().with_special_tokens(special)

    def text(tools: Sequence[skills.Tool], thinking: bool) -> str:
        body: dict[str, Any] = {
            "model": "DeepSeek-V4.1-Flash",
            "messages": [{"role": "user", "content": ""}],
            "thinking": {"type": "enabled" if thinking else "disabled"},
        }
        if tools:
            body["tools"] = [tool.schema() for tool in tools]
        rendered = encoding.render_conversation(
            deepseek_recipe.ChatCompletionRequest(body).convert(options).conversation
        )
        system: str = rendered.prompt.removeprefix(BOS).split(USER)[0]
        return system

    return text


def conversation(writer: Writer, random: Random, length: int, mix: Mapping[str, float] = MIXES["recall"]) -> Example:
    """One conversation of at least `length` tokens; cut it there."""
    thinking = random.random() < 0.03
    with_tools = length >= FOR_SCHEMAS and random.random() < 0.5
    tools = skills.tools(random, random.randint(1, 2)) if with_tools else []
    example = writer.start(tools, thinking)
    notes = skills.Notes(random)
    filler = random.choice((0.0, 0.0, 0.5))
    if random.random() < 0.85:
        share = random.random() * (0.3 if tools else 0.75)
        count = max(2, int(share * (length - len(example.ids)) / (5 + 6 * filler)))
        writer.add(example, Turn("noted", notes.tell(count, filler), NOTED), thinking)
    while len(example.ids) < length:
        for turn in _next(random, notes, tools, mix):
            writer.add(example, turn, thinking)
    return example


# How a fact is told in a drill: the shorter, the more of them in a text.
FORMS = (" {name} {thing}", " {name} has {thing}", " {name} has a {thing}.")


def drill(writer: Writer, random: Random, length: int, most_facts: int) -> Example:
    """Two to most_facts facts, all told again and again in changing order: the densest text to learn recall from.

    The answers are the things, from the second time on.
    """
    example, form = writer.start(), random.choice(FORMS)
    names = random.sample(lexicon.FIRST_NAMES, random.randint(2, most_facts))
    things = {name: random.choice(lexicon.THINGS) for name in names}
    told = False
    while len(example.ids) < length:
        for name in random.sample(names, len(names)):
            before, after = form.format(name=name, thing="\0").split("\0")
            example.ids += writer.encode(before.rstrip())
            first = len(example.ids)
            example.ids += writer.encode(" " + things[name])
            if told:
                example.answers.append(("recall", first, len(example.ids)))
            example.ids += writer.encode(after)
        told = True
    return example


def drill_by_heart(writer: Writer, random: Random, length: int) -> Example:
    """Jobs and sums told one after the other, each with its answer: the densest text to learn them by heart from."""
    example = writer.start()
    while len(example.ids) < length:
        turn = (skills.fact if random.random() < 0.5 else skills.sum_)(random)
        asked, known = turn.user, turn.answer
        if turn.skill == "fact":  # the job comes right after the name
            asked, known = asked.removesuffix("?"), known.removeprefix("A").removesuffix(".")
        example.ids += writer.encode(" " + asked)
        first = len(example.ids)
        example.ids += writer.encode(known)
        example.answers.append((turn.skill, first, len(example.ids)))
        example.ids += writer.encode(".")
    return example


def drill_tools(writer: Writer, random: Random, length: int, schemas: bool = False, owners: float = 0.0) -> Example:
    """One call after another.

    schemas: in long texts, of up to three tools, which the system turn lists. Else each of a new tool, which nothing
    lists: kinds of values follow from the names of parameters. owners: see `skills.tools`.
    """
    tools = skills.tools(random, random.randint(1, 3), owners) if schemas and length >= FOR_SCHEMAS else []
    example = writer.start(tools)
    while len(example.ids) < length:
        tool = random.choice(tools) if tools else skills.tools(random, 1)[0]
        for turn in tool.use(random):
            writer.add(example, turn)
    return example


def _next(random: Random, notes: skills.Notes, tools: list[skills.Tool], mix: Mapping[str, float]) -> list[Turn]:
    if tools and random.random() < 0.8:
        return random.choice(tools).use(random)
    kinds = [k for k in mix if k != "recall" or notes.owners]
    kind = random.choices(kinds, [mix[k] for k in kinds])[0]
    if kind == "tell":
        text = notes.tell(random.randint(1, 4))
        if random.random() < 0.5 and notes.owners and text:  # told and asked in one breath
            asked = notes.ask()
            return [Turn("recall", f"{text} {asked.user}", asked.answer, distance=asked.distance)]
        return [Turn("noted", text, NOTED)] if text else []
    if kind == "recall":
        several = random.random() < SEVERAL and len(notes.owners) > 1
        return [notes.ask(*random.sample(notes.owners, min(3, len(notes.owners))) if several else ())]
    return [skills.SIMPLE[kind](random)]
