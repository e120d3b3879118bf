"""The mixture of experts of one layer."""

from __future__ import annotations

from torch import Tensor

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.kernels import moe


class MixtureOfExperts:
    def __init__(self, checkpoint: Checkpoint, layer: int) -> None:
        config, name = checkpoint.config, f"layers.{layer}.ffn"
        self.gate, self.bias = checkpoint.tensor(f"{name}.gate.weight"), checkpoint.tensor(f"{name}.gate.bias")
        self.experts = moe.Experts(_expert(checkpoint, f"{name}.experts.{e}") for e in range(config.n_routed_experts))
        self.shared = _expert(checkpoint, f"{name}.shared_experts")
        self.top_k, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.temperature, self.limit = config.gate_temp, config.swiglu_limit

    def __call__(self, x: Tensor) -> Tensor:
        """bfloat16 [T, d] -> bfloat16 [T, d]."""
        router = (self.gate, self.bias, self.top_k, self.scale, self.temperature)
        return moe.feed_forward(x, *router, self.experts, self.shared, self.limit)


def _expert(checkpoint: Checkpoint, name: str) -> moe.ExpertWeights:
    return moe.ExpertWeights(*(checkpoint.weight(f"{name}.{part}") for part in ("w1", "w2", "w3")))
