"""One layer: hyper-connections around attention and experts (architecture.md 2.3)."""

from __future__ import annotations

from torch import Tensor

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.config import LayerPlan
from sglang_ced.kernels.mhc import expand
from sglang_ced.model.attention import Attention
from sglang_ced.model.context import HalfContext, RopeTables
from sglang_ced.model.engram import Engram
from sglang_ced.model.mhc import HyperConnection
from sglang_ced.model.moe import MixtureOfExperts


class Block:
    def __init__(self, checkpoint: Checkpoint, plan: LayerPlan, tables: RopeTables) -> None:
        name, self.plan = f"layers.{plan.index}", plan
        self.hc_attn = HyperConnection(checkpoint, f"{name}.hc_attn", f"{name}.attn_norm")
        self.hc_ffn = HyperConnection(checkpoint, f"{name}.hc_ffn", f"{name}.ffn_norm")
        self.attention = Attention(checkpoint, plan, tables)
        self.experts = MixtureOfExperts(checkpoint, plan.index)
        self.engram = Engram(checkpoint, plan.index) if plan.has_engram else None

    def __call__(
        self, streams: Tensor, pre_mix: Tensor, context: HalfContext, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """streams bfloat16 [T, n, d] and float32 [T, n] collapse weights of the site before -> both for the next layer.

        keep: rows that go on after this layer's global KV is written (the cut between encoder and decoder), None for
        all; the context is that of the rows that stay.
        """
        if self.engram is not None:
            streams = self.engram(streams, context.memory[self.plan.index])
        x, pre, post, comb = self.hc_attn(streams, pre_mix)
        if self.attention.source is not None:
            self.attention.source.write(x, context)
        if keep is not None:
            streams, x, pre, post, comb = (each[keep] for each in (streams, x, pre, post, comb))
        streams = expand(self.attention(x, context), streams, post, comb)
        x, next_pre, post, comb = self.hc_ffn(streams, pre)
        return expand(self.experts(x), streams, post, comb), next_pre
