"""Where in a text the facts are that its answers repeat: what `fast.guide_loss` teaches attention to look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from training import fast, lexicon
from training.conversation import Example

NEAR = 3  # tokens from a name to the last word of a fact about it


class Guide:
    """Finds names and things by their tokens. encode: text -> ids."""

    def __init__(self, encode: Callable[[str], list[int]], vocabulary: int) -> None:
        self.name = torch.full((vocabulary,), -1)
        self.is_thing = torch.zeros(vocabulary, dtype=torch.bool)
        for number, name in enumerate(lexicon.FIRST_NAMES):
            for ids in (encode(name), encode(" " + name)):
                if len(ids) == 1:
                    self.name[ids[0]] = number
        for thing in lexicon.THINGS:
            self.is_thing[encode(" " + thing)[0]] = True

    def look(self, ids: Tensor, answer: Tensor, examples: Sequence[Example]) -> fast.Guidance:
        """bool [B, T, T] each. ids [B, T + 1]; answer bool [B, T].

        sources: rows whose next token is the thing of an answer -> where the same thing was told of the same name.
        subjects: rows up to NEAR tokens after a name -> that name. cues: those of the examples, whose copies
            are sources, too.
        """
        seen, following = ids[:, :-1], ids[:, 1:]
        position = torch.arange(seen.shape[1])
        last = torch.where(self.name[seen] >= 0, position, -1).cummax(1).values
        name = torch.where(last >= 0, self.name[seen.gather(1, last.clamp(min=0))], -1)
        asked = answer & self.is_thing[following] & (name >= 0)
        told = self.is_thing[seen] & (position - last <= NEAR)
        sources = asked[:, :, None] & told[:, None] & (following[:, :, None] == seen[:, None])
        sources &= (name[:, :, None] == name[:, None]) & (position[:, None] >= position)
        near = (last >= 0) & (position - last <= NEAR)
        cues = torch.zeros_like(sources)
        for text, example in enumerate(examples):
            for row, place in example.cues:
                if row < len(position):
                    cues[text, row, place] = True
            for row, place in example.copies:
                if row < len(position):
                    sources[text, row, place] = True
        return fast.Guidance(sources, near[:, :, None] & (position == last[:, :, None]), cues)
