"""The n-gram memory: table rows, and their fusion into the streams."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kernel_ext._library import fake, ops


def look_up(codes: Tensor, scales: Tensor, rows: Tensor, serial: bool = False) -> Tensor:
    """Dequantise rows of a table: e4m3 codes uint8 [N, D], ue8m0 scales uint8 [N, D/32], rows int64 [T, R].

    serial: by the calling thread alone, for one that works beside a forward.

    Returns:
        bfloat16 [T, R D].

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit. IndexError: a row is not in the table.
    """
    result: Tensor = _look_up(codes, scales, rows, serial)
    return result


def read_rows(fd: int, offset: int, rows: Tensor, out: Tensor) -> tuple[int, int]:
    """Read rows of an open file, whose row 0 begins at byte `offset`, into `out`.

    rows: int64 [n]; out: uint8 [n, bytes of a row], written. Without the interpreter's lock, and with all that the
    page cache lacks in flight at once.

    Returns:
        (-1, 0), or the index of the first row that could not be read and why, as an errno; ENODATA: the file ends
        before it. `out` is then not to be used.
    """
    result: tuple[int, int] = _read_rows(fd, offset, rows, out)
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


_look_up, _read_rows, _fuse = ops.look_up.default, ops.read_rows.default, ops.fuse.default
fake(
    "sgl_kernel_ext::look_up",
    lambda codes, scales, rows, serial=False: codes.new_empty(
        (rows.shape[0], rows.shape[1] * codes.shape[1]), dtype=torch.bfloat16
    ),
)
fake("sgl_kernel_ext::fuse", lambda streams, *_: torch.empty_like(streams))
