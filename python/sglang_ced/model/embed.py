"""Token embedding and output head."""

from __future__ import annotations

from torch import Tensor

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.kernels.linear import matmul


class Embedding:
    """Token ids int64 [T] -> streams bfloat16 [T, n, d]: the embedding, repeated over the streams."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.weight, self.streams = checkpoint.tensor("embed.weight"), checkpoint.config.hc_mult

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self.weight[token_ids].unsqueeze(1).repeat(1, self.streams, 1)


class Head:
    """bfloat16 [T, d] -> logits float32 [T, vocab]. Multiplied without rounding to bfloat16."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.weight = checkpoint.tensor("head.weight")

    def __call__(self, hidden: Tensor) -> Tensor:
        return matmul(hidden, self.weight)
