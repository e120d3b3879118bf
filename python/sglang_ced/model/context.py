"""What the layers of one forward share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sglang_ced.cache.state import CacheState
from sglang_ced.cache.step import HalfPlan, Reach, Step
from sglang_ced.config import CedConfig
from sglang_ced.kernels import rope
from sglang_ced.model.engram import Memory


class RopeTables:
    """Frequencies of the plain and the compressed table."""

    def __init__(self, config: CedConfig, device: str | torch.device = "cpu") -> None:
        dim, yarn = config.qk_rope_head_dim, config.rope_scaling
        extra = () if yarn is None else (yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.original_max_position)
        self.plain = rope.frequencies(dim, config.rope_theta).to(device)
        self.compressed = rope.frequencies(dim, config.compress_rope_theta, *extra).to(device)


@dataclass
class HalfContext:
    """The rows that run in one half of the stack, and what its layers hand on. T = rows of the half.

    keys[index source]: int64 [T, N] key lists of its layers: window rows, then the pool slots of the chosen groups.
    candidates[source]: per span, bool [rows, groups]. memory[Engram layer]: its rows of the step.
    """

    step: Step
    state: CacheState
    plan: HalfPlan
    reach: tuple[Reach, ...]
    positions: Tensor
    plain: tuple[Tensor, Tensor]
    compressed: tuple[Tensor, Tensor]
    memory: Mapping[int, Memory]
    keys: dict[int, Tensor] = field(default_factory=dict)
    candidates: dict[int, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def make(cls, step: Step, state: CacheState, tables: RopeTables, memory: Mapping[int, Memory]) -> HalfContext:
        """Of the encoder, which runs all rows."""
        plain, compressed = (rope.angles(step.positions, freq) for freq in (tables.plain, tables.compressed))
        return cls(step, state, step.encoder, step.encoder_reach, step.positions, plain, compressed, memory)

    def decoder(self) -> HalfContext:
        """Of the rows that go on into the decoder."""
        step, rows = self.step, self.step.decoder.rows
        positions, plain, compressed = self.positions, self.plain, self.compressed
        if len(rows) < len(positions):
            positions = positions[rows]
            plain, compressed = ((cos[rows], sin[rows]) for cos, sin in (plain, compressed))
        return HalfContext(
            step, self.state, step.decoder, step.decoder_reach, positions, plain, compressed, self.memory
        )

    def angles(self, ratio: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of a layer's own rows: layers without global KV use the plain table."""
        return self.compressed if ratio else self.plain
