"""RMSNorm (architecture.md 2.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ced.kernels.registry import op


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, kept: float32 [..., 1]. The mean is taken in float64."""
    return torch.rsqrt(x.double().square().mean(-1, keepdim=True).float() + eps)


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D] -> bfloat16 [..., D]. float32 throughout, rounded once; a zero row gives zeros."""
    x = x.float()
    return (x * inverse_rms(x, eps) * weight.float()).to(torch.bfloat16)
