"""The stack: encoder rows, the cut inside the first decoder layer, decoder rows, output rows."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ced.cache.state import CacheState
from sglang_ced.cache.step import Step
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.engram_store.placement import StoreOptions
from sglang_ced.kernels.mhc import collapse
from sglang_ced.kernels.norm import rms_norm
from sglang_ced.model.block import Block
from sglang_ced.model.context import HalfContext, RopeTables
from sglang_ced.model.embed import Embedding, Head
from sglang_ced.model.engram import EngramRows


class Transformer:
    """Weights of a checkpoint, mapped from its files, and the forward over a `Step`."""

    def __init__(self, checkpoint: Checkpoint, engram: StoreOptions) -> None:
        config = self.config = checkpoint.config
        self.engram_rows = EngramRows(checkpoint, engram)
        self.tables = RopeTables(config, checkpoint.device)
        self.embed, self.head = Embedding(checkpoint), Head(checkpoint)
        self.norm = checkpoint.tensor("norm.weight")
        self.blocks = [Block(checkpoint, plan, self.tables) for plan in config.layers]

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, device: str | torch.device = "cpu", engram: StoreOptions | None = None
    ) -> Transformer:
        """Bind the tensors of an opened checkpoint; on another device than the CPU they are copied there, but for the
        n-gram tables, whose place `engram` says."""
        return cls(checkpoint.on(device), engram or StoreOptions())

    @torch.inference_mode()
    def forward(self, step: Step, state: CacheState, next_history: Tensor | None = None) -> Tensor:
        """Run a step and commit it -> bfloat16 [output rows, d] after the final norm, in span order.

        next_history int64 [T, max_ngram], as in a step: rows that will probably run next, whose Engram rows may be
        brought nearer meanwhile.

        Raises TableError where rows of an Engram table cannot be had; nothing is committed then.
        """
        memory = self.engram_rows.begin(step)
        if next_history is not None:
            self.engram_rows.ahead(next_history)
        streams = self.embed(step.token_ids)
        pre_mix = torch.zeros(streams.shape[:2], dtype=torch.float32, device=streams.device)
        pre_mix[:, 0] = 1.0
        context = HalfContext.make(step, state, self.tables, memory)
        cut = self.config.first_decoder_layer
        for block in self.blocks[:cut]:
            streams, pre_mix = block(streams, pre_mix, context)
        context = context.decoder()
        keep = step.decoder.rows if len(step.decoder.rows) < step.num_rows else None
        streams, pre_mix = self.blocks[cut](streams, pre_mix, context, keep)
        for block in self.blocks[cut + 1 :]:
            streams, pre_mix = block(streams, pre_mix, context)
        state.commit(step)
        rows = step.output_rows
        return rms_norm(collapse(streams[rows], pre_mix[rows]), self.norm, self.config.rms_norm_eps)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """bfloat16 [T, d] -> float32 [T, vocab], an ordinary tensor: samplers add penalties to it in place."""
        return self.head(hidden)
