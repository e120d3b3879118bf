"""Products with a weight [N, K], read as it is stored. A row's result depends on nothing but the row."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kernel_ext._library import fake, ops


def linear_e4m3(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """y = round(x) W^T for e4m3 weights with one ue8m0 scale per 32x32 tile.

    `round` is `fake_quant_e4m3`. Each block of 32 inputs is summed exactly, rounded to float32, and blocks are added in
    float32 in order; then one rounding to bfloat16.

    Args:
        x: bfloat16 [..., K], contiguous, K a multiple of 32.
        codes: uint8 [N, K]; scales: uint8 [ceil(N/32), K/32].

    Returns:
        bfloat16 [..., N].

    Raises:
        TypeError: a dtype is another one. ValueError: shapes do not fit, or a tensor is not contiguous.
    """
    result: Tensor = _linear_e4m3(x, codes, scales)
    return result


def linear_e2m1(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """As `linear_e4m3`, for e2m1 weights: packed uint8 [N, K/2] (even input in the low nibble), scales [N, K/32]."""
    result: Tensor = _linear_e2m1(x, packed, scales)
    return result


def linear_bfloat16(x: Tensor, weight: Tensor) -> Tensor:
    """`matmul` rounded to bfloat16."""
    result: Tensor = _linear_bfloat16(x, weight)
    return result


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] by weight [N, K], each bfloat16 or float32, contiguous -> float32 [..., N].

    Eight float64 sums per element, over the inputs of equal index modulo 8, are added in a fixed order and rounded
    once.

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit, or a tensor is not contiguous.
    """
    result: Tensor = _matmul(x, weight)
    return result


def grouped_linear(x: Tensor, weight: Tensor, scales: Tensor | None, groups: int) -> Tensor:
    """Group g of the input by group g of the weight's rows, summed as in `matmul`, rounded to bfloat16.

    Args:
        x: bfloat16 or float32 [..., groups * I], contiguous; not rounded to e4m3.
        weight: [groups * R, I] bfloat16 or float32; or, with `scales`, e4m3 codes uint8 [groups * R, I] with scales
            [ceil(groups * R / 32), ceil(I / 32)], or packed e2m1 [groups * R, I / 2] with scales [groups * R, I / 32].

    Returns:
        bfloat16 [..., groups * R].

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit, or a tensor is not contiguous.
    """
    result: Tensor = _grouped_linear(x, weight, scales, groups)
    return result


def _bfloat16_of(x: Tensor, n: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n), dtype=torch.bfloat16)


_linear_e4m3, _linear_e2m1 = ops.linear_e4m3.default, ops.linear_e2m1.default
_linear_bfloat16, _matmul, _grouped_linear = ops.linear_bfloat16.default, ops.matmul.default, ops.grouped_linear.default
fake("sgl_kernel_ext::linear_e4m3", lambda x, codes, scales: _bfloat16_of(x, codes.shape[0]))
fake("sgl_kernel_ext::linear_e2m1", lambda x, packed, scales: _bfloat16_of(x, packed.shape[0]))
fake("sgl_kernel_ext::linear_bfloat16", lambda x, weight: _bfloat16_of(x, weight.shape[0]))
fake("sgl_kernel_ext::matmul", lambda x, weight: x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32))
fake("sgl_kernel_ext::grouped_linear", lambda x, weight, scales, groups: _bfloat16_of(x, weight.shape[0]))
