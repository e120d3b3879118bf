"""Matrix products with bfloat16, fp8 or fp4 weights (architecture.md 4, 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_ced import formats
from sglang_ced.formats import E2m1Weight, E4m3Weight, Weight
from sglang_ced.kernels.registry import op


@op
def round_input(x: Tensor) -> Tensor:
    """bfloat16 [..., K] rounded to e4m3 with a ue8m0 scale per 32, and back: what a quantised linear sees."""
    return formats.fake_quant_e4m3(x)


@op
def linear(x: Tensor, weight: Weight) -> Tensor:
    """y = x W^T. x bfloat16 [..., K], weight [N, K] -> bfloat16 [..., N].

    Stored weights (fp8, fp4) have their input rounded by `round_input`; blocks of 32 inputs are summed exactly, then
    added in float32 in order, as the publisher's kernels do. A bfloat16 weight takes its input as it is.
    """
    if isinstance(weight, Tensor):
        return matmul(x, weight).to(torch.bfloat16)
    rows = round_input(x).double().split(formats.BLOCK, -1)
    columns = weight.dequantize().double().split(formats.BLOCK, -1)
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    for row, column in zip(rows, columns, strict=True):
        total = total + F.linear(row, column).float()
    return total.to(torch.bfloat16)


@op
def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] by weight [N, K], any float dtypes -> float32 [..., N], summed in float64."""
    return F.linear(x.double(), weight.double()).float()


@op
def grouped_linear(x: Tensor, weight: Weight, groups: int) -> Tensor:
    """Output projection A: group g of the input by group g of the weight's rows.

    x bfloat16 [T, groups * I], weight [groups * R, I] -> bfloat16 [T, groups * R]. The input is not rounded to fp8.
    """
    full = weight.dequantize() if isinstance(weight, (E4m3Weight, E2m1Weight)) else weight
    by_group = full.double().unflatten(0, (groups, -1))
    out = torch.einsum("tgi,gri->tgr", x.double().unflatten(-1, (groups, -1)), by_group)
    return out.flatten(-2).to(torch.bfloat16)
