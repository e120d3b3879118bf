"""The n-gram memory: table rows, and their fusion into the streams."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kernel_ext._library import fake, ops


def look_up(codes: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Dequantise rows of a table: e4m3 codes uint8 [N, D], ue8m0 scales uint8 [N, D/32], rows int64 [T, R].

    Returns:
        bfloat16 [T, R D].

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit. IndexError: a row is not in the table.
    """
    result: Tensor = _look_up(codes, scales, rows)
    return result


def fuse(streams: Tensor, keys_value: Tensor, qk_weight: Tensor, eps: float, alive: Tensor | None = None) -> Tensor:
    """streams[k] + gate[k] value, with gate = sigmoid(sign(s) sqrt(max(|s|, 1e-6))) of the normed dot product s of
    stream and key times d^-0.5. float32; the sums over d and the sigmoid in float64.

    Args:
        streams: bfloat16 [T, n, d]; keys_value: bfloat16 [T, (n + 1) d], n keys, then one value; qk_weight: float32
            [n, d], which multiplies the terms of the dot product; alive: bool [T], False = gate 0. All contiguous.

    Returns:
        bfloat16 [T, n, d].
    """
    result: Tensor = _fuse(streams, keys_value, qk_weight, eps, alive)
    return result


_look_up, _fuse = ops.look_up.default, ops.fuse.default
fake(
    "sgl_kernel_ext::look_up",
    lambda codes, scales, rows: codes.new_empty((rows.shape[0], rows.shape[1] * codes.shape[1]), dtype=torch.bfloat16),
)
fake("sgl_kernel_ext::fuse", lambda streams, *_: torch.empty_like(streams))
