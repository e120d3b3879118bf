"""Block quantisation to e4m3 with one power-of-two scale per 32 values."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kernel_ext._library import fake, ops

BLOCK = 32


def fake_quant_e4m3(x: Tensor) -> Tensor:
    """Round to e4m3 with one power-of-two scale per 32 values, and back.

    Per block: scale = 2^ceil(log2(max(amax, 1e-4) / 448)); code = e4m3fn(x / scale), to nearest even,
    saturating at +-448; result = code * scale, which bfloat16 holds exactly. Signs of zeros are kept.

    A NaN stays the NaN it was and does not count in its block's amax. An infinity counts as the largest
    finite bfloat16; it and every finite value whose rounded form lies beyond the range come out as infinity.

    Args:
        x: bfloat16 [..., K] on CPU, contiguous, K a multiple of 32.

    Returns:
        bfloat16, shape of `x`.

    Raises:
        TypeError: `x` is not bfloat16.
        ValueError: K is not a multiple of 32, or `x` is not contiguous. Both name the shape and dtype.
    """
    result: Tensor = _fake_quant_e4m3(x)
    return result


def quantize_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first half of `fake_quant_e4m3`: codes and scales instead of their product.

    A NaN has code 0x7f or 0xff, by its sign; an infinity has the code of +-448 under the scale 2^120.

    Args:
        x: bfloat16 [..., K] on CPU, contiguous, K a multiple of 32.

    Returns:
        codes uint8 [..., K], the bytes of e4m3fn; scales uint8 [..., K/32], where byte b means 2^(b-127).

    Raises:
        TypeError, ValueError: as `fake_quant_e4m3`.
    """
    codes, scales = _quantize_e4m3(x)
    return codes, scales


def _quantize_e4m3_shapes(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty_like(x, dtype=torch.uint8)
    return codes, codes.new_empty((*x.shape[:-1], x.shape[-1] // BLOCK))


_fake_quant_e4m3, _quantize_e4m3 = ops.fake_quant_e4m3.default, ops.quantize_e4m3.default
fake("sgl_kernel_ext::fake_quant_e4m3", torch.empty_like)
fake("sgl_kernel_ext::quantize_e4m3", _quantize_e4m3_shapes)
