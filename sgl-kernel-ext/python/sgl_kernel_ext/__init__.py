"""C++ kernels for CPU, as plain functions over tensors.

Importing this module loads the op library, so `torch.ops.sgl_kernel_ext.*` exist as well. Every hot loop is
built for generic x86-64, AVX2 and AVX-512; the best level of the CPU is used, unless the environment
variable `SGL_KERNEL_EXT_CPU` or `force_cpu_capability` asks for a lower one. All levels give the same bits.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

__version__ = "0.1.0"
__all__ = [
    "cpu_capability",
    "fake_quant_e4m3",
    "force_cpu_capability",
    "quantize_e4m3",
    "supported_cpu_capabilities",
]

BLOCK = 32

torch.ops.load_library(Path(__file__).with_name("_sgl_kernel_ext.so"))
_ops = torch.ops.sgl_kernel_ext


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
    result: Tensor = _ops.fake_quant_e4m3(x)
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
    codes, scales = _ops.quantize_e4m3(x)
    return codes, scales


def cpu_capability() -> str:
    """The level in use: "generic", "avx2" or "avx512"."""
    level: str = _ops.cpu_capability()
    return level


def supported_cpu_capabilities() -> list[str]:
    """The levels that this CPU can run, lowest first."""
    levels: list[str] = _ops.supported_cpu_capabilities()
    return levels


def force_cpu_capability(level: str | None) -> None:
    """Use `level` from now on, in the whole process; None goes back to the best one.

    Raises:
        ValueError: this CPU or this build does not have `level`.
    """
    _ops.force_cpu_capability(level or "")


def _quantize_e4m3_shapes(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = torch.empty_like(x, dtype=torch.uint8)
    return codes, codes.new_empty((*x.shape[:-1], x.shape[-1] // BLOCK))


torch.library.register_fake("sgl_kernel_ext::fake_quant_e4m3", torch.empty_like)
torch.library.register_fake("sgl_kernel_ext::quantize_e4m3", _quantize_e4m3_shapes)
