"""Attention over window rows and global records. A row's result depends on nothing but the row."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kernel_ext._library import fake, ops


def join_keys(window: Tensor, groups: Tensor, num_window_rows: int) -> Tensor:
    """The entries of window, int64 [T, W], and groups, int64 [T, K], that are not negative, of the latter plus
    `num_window_rows`, in order; then -1 -> int64 [T, W + K].

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit, or a tensor is not contiguous.
    """
    result: Tensor = _join_keys(window, groups, num_window_rows)
    return result


def attend(q: Tensor, window: Tensor, pool: Tensor | None, keys: Tensor, sink: Tensor) -> Tensor:
    """One online softmax per row and head, over blocks of 64 entries of its key list; keys are the values, too.

    Scores are float64 dots rounded to float32, times D^-0.5 in float32; exp is rounded to float32, and to bfloat16
    where it meets the values; sums are float64.

    Args:
        q: bfloat16 [T, H, D], D a multiple of 16.
        window: bfloat16 [M, D].
        pool: uint8 [S, D/2 + D/16]: packed e2m1 (even index in the low nibble), then one e4m3 scale per 16; or
            uint8 [S, 2 * D]: bfloat16; or None.
        keys: int64 [T, N]: below M a window row, from M on pool slot + M, negative none.
        sink: float32 [H], a score that joins the denominator only. All tensors contiguous.

    Returns:
        bfloat16 [T, H, D]; zeros for a row without keys.

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit. IndexError: an entry of `keys` is too large.
    """
    result: Tensor = _attend(q, window, pool, keys, sink)
    return result


_join_keys, _attend = ops.join_keys.default, ops.attend.default
fake(
    "sgl_kernel_ext::join_keys",
    lambda window, groups, _: window.new_empty((window.shape[0], window.shape[1] + groups.shape[1])),
)
fake("sgl_kernel_ext::attend", lambda q, *_: torch.empty_like(q))
