"""Rotary positions: the plain and the compressed (YaRN) table, rotation and its inverse (architecture.md 2.5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sglang_ced.kernels.registry import op


def frequencies(
    rope_dim: int,
    theta: float,
    factor: float = 1.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    original_max_position: int = 0,
) -> Tensor:
    """float32 [rope_dim / 2] radians per position; YaRN interpolation where `original_max_position` is given."""
    freq = 1.0 / theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
    if not original_max_position:
        return freq

    def correction(rotations: float) -> float:
        return rope_dim * math.log(original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(beta_fast)), 0)
    high = min(math.ceil(correction(beta_slow)), rope_dim - 1)
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return freq / factor * ramp + freq * (1 - ramp)


def angles(positions: Tensor, freq: Tensor) -> tuple[Tensor, Tensor]:
    """positions int [T] -> (cos, sin) float32 [T, rope_dim / 2].

    The angle is a float32 product, as the publisher forms it: at a million tokens a wider one would differ visibly.
    """
    angle = (positions.to(torch.float32)[:, None] * freq).double()
    return angle.cos().float(), angle.sin().float()


@op
def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2*F dims of x [T, ..., D] in adjacent pairs by (cos, sin) [T, F]; same dtype out."""
    if inverse:
        sin = -sin
    shape = (cos.shape[0], *[1] * (x.dim() - 2), cos.shape[1])
    cos, sin = cos.view(shape), sin.view(shape)
    rope = 2 * cos.shape[-1]
    even, odd = x[..., -rope:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-rope], turned.to(x.dtype)), -1)
