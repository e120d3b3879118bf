"""Fast CPU versions of the ops, from the package `sgl-kernel-ext`. Registered on import, chosen by
`registry.activate`."""

from __future__ import annotations

import importlib.util

from torch import Tensor

from sglang_ced.kernels import linear


def available() -> bool:
    """Whether sgl-kernel-ext is installed."""
    return importlib.util.find_spec("sgl_kernel_ext") is not None


@linear.round_input.register("cpu")
def round_input(x: Tensor) -> Tensor:
    import sgl_kernel_ext

    return sgl_kernel_ext.fake_quant_e4m3(x.contiguous())
