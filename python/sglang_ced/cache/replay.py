"""Which rows a request must run again after a prefix hit: pure functions of integers (design:
docs/explanation/replay.md).

W = window, E / D = number of encoder / decoder layers, H = tokens whose global KV is in the prefix cache, n = prompt
length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MODES = ("exact", "bounded", "encoder")
Replay = Literal["exact", "bounded", "encoder"]


@dataclass(frozen=True)
class ReplayPlan:
    """Absolute positions, kept with the request for its life.

    start: first row to run (replay rows are [start, H)); also the encoder's window floor.
    decoder_start: first row that runs in decoder layers; also the decoder's window floor.
    """

    start: int
    decoder_start: int


def plan_replay(
    mode: Replay, hit: int, prompt: int, outputs_from: int, window: int, encoder_layers: int, decoder_layers: int
) -> ReplayPlan:
    """Plan of a request that starts with `hit` cached tokens of a prompt of `prompt` tokens.

    outputs_from: first position whose output the request wants (prompt logprobs, hidden states); those rows always
    run whole.

    exact: the warm answer equals the cold one. A window layer sees W - 1 tokens back, so the last decoder layer
    depends on (E + D)(W - 1) earlier rows through the encoder, and the decoder layers among themselves on D(W - 1).
    bounded: the encoder replays the last W cached rows; the decoder runs the last W rows of the prompt.
    encoder: bounded in the encoder only; the decoder runs every row that the encoder does.
    """
    if not 0 <= hit < max(prompt, 1):
        raise ValueError(f"a hit of {hit} tokens leaves no row of a prompt of {prompt} to compute")
    if mode == "exact":
        start = max(0, hit - (encoder_layers + decoder_layers) * (window - 1))
        return ReplayPlan(start, max(0, hit - decoder_layers * (window - 1)))
    start = max(0, hit - window)
    if mode == "encoder":
        return ReplayPlan(start, start)
    return ReplayPlan(start, max(start, min(prompt - window, outputs_from)))
