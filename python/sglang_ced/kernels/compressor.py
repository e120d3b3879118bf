"""Global KV latents: pairs of tokens pooled per channel (architecture.md 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ced.kernels.registry import op
from sglang_ced.kernels.sums import add_up


@op
def pool_pairs(kv: Tensor, gate: Tensor) -> Tensor:
    """kv, gate float32 [P, 2, D] (both tokens of each pair) -> bfloat16 [P, D]: softmax over the two, per channel."""
    share = torch.softmax(gate.double(), 1).float()
    return add_up(share * kv, 1).squeeze(1).to(torch.bfloat16)
