"""RMSNorm and rotation, row by row. float32 throughout, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kernel_ext._library import fake, ops


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; the mean is taken in float64.

    Args:
        x: bfloat16 or float32 [..., D]; weight: bfloat16 or float32 [D]. Contiguous.

    Returns:
        bfloat16 [..., D].

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit, or a tensor is not contiguous.
    """
    result: Tensor = _rms_norm(x, weight, eps)
    return result


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2 F dims of x in adjacent pairs by the angles of its row.

    Args:
        x: bfloat16 [T, ..., D], contiguous; cos, sin: float32 [T, F], contiguous; inverse: by the negative angles.

    Returns:
        bfloat16, shape of `x`.

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit, or a tensor is not contiguous.
    """
    result: Tensor = _rotate(x, cos, sin, inverse)
    return result


_rms_norm, _rotate = ops.rms_norm.default, ops.rotate.default
fake("sgl_kernel_ext::rms_norm", lambda x, weight, eps: torch.empty_like(x, dtype=torch.bfloat16))
fake("sgl_kernel_ext::rotate", lambda x, *_: torch.empty_like(x))
