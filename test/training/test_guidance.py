"""Guidance points at what a reader would point at, and drills are what they say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

import torch

from training import conversation, guidance, skills, tokenizer

TOKENS = tokenizer.train()
ENCODE = conversation.Writer(TOKENS, lambda tools, thinking: "").encode


def test_the_source_of_an_answer_is_where_the_same_was_told_of_the_same_name() -> None:
    guide = guidance.Guide(ENCODE, TOKENS.get_vocab_size())
    ids = torch.tensor([ENCODE(" Ada has a fox. Ben has a fox. Cleo has a cup. Ada has a fox. Ben has a")])
    words = [TOKENS.decode([token]).strip() for token in ids[0].tolist()]
    answer = torch.zeros(1, ids.shape[1] - 1, dtype=torch.bool)
    row = len(words) - 6  # " a" of the second "Ada has a fox."
    assert words[row : row + 3] == ["a", "fox", "."]
    answer[0, row] = True
    guidance_ = guide.look(ids, answer, [])
    sources, subjects = guidance_.sources, guidance_.subjects
    assert sources[0].nonzero().tolist() == [[row, 3]]
    # a row up to three tokens after a name speaks of it; the full stop does not
    about = {at: words[name] for at, name in subjects[0].nonzero().tolist()}
    assert [about.get(at) for at in range(10)] == ["Ada"] * 4 + [None] + ["Ben"] * 4 + [None]


def test_every_answer_of_a_drill_was_told_before() -> None:
    guide = guidance.Guide(ENCODE, TOKENS.get_vocab_size())
    writer = conversation.Writer(TOKENS, lambda tools, thinking: "")
    for seed in range(20):
        example = conversation.drill(writer, Random(seed), 129, 6)
        ids, answer = torch.tensor([example.ids[:129]]), torch.zeros(1, 129, dtype=torch.bool)
        for _, first, end in example.answers:
            answer[0, first:end] = True
        sources = guide.look(ids, answer[:, 1:], [example]).sources
        asked = answer[0, 1:].nonzero().flatten().tolist()
        assert asked
        assert sources[0].any(-1).nonzero().flatten().tolist() == asked


def test_cues_point_from_what_is_known_by_heart_to_its_ngram() -> None:
    guide = guidance.Guide(ENCODE, TOKENS.get_vocab_size())
    writer, random = conversation.Writer(TOKENS, lambda tools, thinking: ""), Random(0)
    example = writer.start()
    turns = [skills.fact(random), skills.sum_(random)]
    for turn in turns:
        writer.add(example, turn)
    ids = torch.tensor([example.ids])
    cues = guide.look(ids, torch.zeros(1, len(example.ids) - 1, dtype=torch.bool), [example]).cues
    shown = [
        (TOKENS.decode([example.ids[row + 1]]), TOKENS.decode([example.ids[place]])) for _, row, place in cues.nonzero()
    ]
    fact, sum_ = turns
    assert shown[0] == (fact.answer.removeprefix("A").removesuffix("."), " " + fact.user.removesuffix("?").split()[-1])
    assert shown[1] == (sum_.answer, sum_.user.removesuffix("?")[-1])


def test_a_drill_with_schemas_calls_the_tools_of_its_system_turn_and_nothing_else() -> None:
    listed: list[set[str]] = []

    def system(tools: Sequence[skills.Tool], thinking: bool) -> str:
        listed.append({tool.name for tool in tools})
        return ""

    writer = conversation.Writer(TOKENS, system)
    for seed in range(20):
        example = conversation.drill_tools(writer, Random(seed), conversation.FOR_SCHEMAS, schemas=True)
        called = set(re.findall(r'invoke name="(\w+)"', TOKENS.decode(example.ids, skip_special_tokens=False)))
        assert called
        assert called <= listed[-1]
    conversation.drill_tools(writer, Random(0), conversation.FOR_SCHEMAS - 1, schemas=True)
    assert len(listed) == 20  # too short a text for a system turn
