"""Guidance points at what a reader would point at, and drills are what they say."""

from __future__ import annotations

from random import Random

import torch

from training import conversation, guidance, tokenizer

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
    sources, subjects = guide.look(ids, answer)
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
        sources, _ = guide.look(ids, answer[:, 1:])
        asked = answer[0, 1:].nonzero().flatten().tolist()
        assert asked
        assert sources[0].any(-1).nonzero().flatten().tolist() == asked
