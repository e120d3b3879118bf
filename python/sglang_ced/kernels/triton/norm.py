"""RMSNorm: a program per row, two passes over it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ced.kernels import norm
from sglang_ced.kernels.triton.numbers import UNFUSED, narrow, widen

FLOATS = (torch.bfloat16, torch.float32)


@triton.jit
def inverse_rms(squares: tl.tensor, count: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """1 / sqrt(squares / count + eps) of float32 sums of squares, each step rounded."""
    count, one = squares * 0.0 + count, tl.full(squares.shape, 1.0, tl.float32)
    return tl.div_rn(one, tl.sqrt_rn(tl.div_rn(squares, count) + eps))


@triton.jit
def _rms_norm(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, D: tl.tensor, eps: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row, i = tl.program_id(0).to(tl.int64) * D, tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, D, BLOCK):
        value = widen(tl.load(x + row + start + i, mask=start + i < D, other=0.0))
        squares += value * value
    scale = inverse_rms(tl.sum(squares, axis=0, keep_dims=True), D, eps)
    for start in range(0, D, BLOCK):
        value = widen(tl.load(x + row + start + i, mask=start + i < D, other=0.0))
        factor = widen(tl.load(weight + start + i, mask=start + i < D, other=0.0))
        tl.store(out + row + start + i, narrow(value * scale * factor, tl.bfloat16), mask=start + i < D)


@norm.rms_norm.register("triton")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype not in FLOATS or weight.dtype not in FLOATS:
        return norm.rms_norm.reference(x, weight, eps)
    x, dim = x.contiguous(), x.shape[-1]
    if weight.shape != (dim,):
        raise ValueError(f"weight of shape {list(weight.shape)} for rows of {dim}")
    out = torch.empty_like(x, dtype=torch.bfloat16)
    if out.numel():
        block = min(triton.next_power_of_2(dim), 2048)
        _rms_norm[(x.numel() // dim,)](x, weight.contiguous(), out, dim, float(eps), block, **UNFUSED)
    return out
