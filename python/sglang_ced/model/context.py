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
    def make(
        cls, step: Step, state: CacheState, decoder: bool, tables: RopeTables, memory: Mapping[int, Memory]
    ) -> HalfContext:
        plan = step.decoder if decoder else step.encoder
        positions = step.positions[plan.rows]
        return cls(
            step=step,
            state=state,
            plan=plan,
            reach=step.decoder_reach if decoder else step.encoder_reach,
            positions=positions,
            plain=rope.angles(positions, tables.plain),
            compressed=rope.angles(positions, tables.compressed),
            memory=memory,
        )

    def angles(self, ratio: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) of a layer's own rows: layers without global KV use the plain table."""
        return self.compressed if ratio else self.plain
