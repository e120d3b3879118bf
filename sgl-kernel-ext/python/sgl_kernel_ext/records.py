"""Cache rows: quantise and store, gather and dequantise.

Kinds: "global" is e2m1 codes with one e4m3 scale per 16 values, "index" e2m1 with one ue8m0 scale per 32, "window"
e4m3 with one ue8m0 scale per 32. Such a record is its codes (two e2m1 per byte, the even index in the low nibble), then
its scales. "global_bf16" and "index_bf16" hold the same rounded values as bfloat16, two bytes each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_kernel_ext._library import fake, ops

RECORD_KINDS = ("global", "index", "window", "global_bf16", "index_bf16")


def write_records(pool: Tensor, rows: Tensor, values: Tensor, kind: str) -> None:
    """Round and store values bfloat16 [P, dim] at rows int64 [P] of pool uint8 [S, bytes of a record], in place.

    Rounding is to nearest, ties to even, saturating; a NaN is stored as zero (in a window record: as NaN) and does not
    count in its block's largest value. All tensors contiguous; rows must not repeat.

    Raises:
        TypeError: another dtype. ValueError: shapes do not fit. IndexError: a row is not in the pool.
    """
    _write_records(pool, rows, values, kind)


def read_records(pool: Tensor, rows: Tensor, dim: int, kind: str) -> Tensor:
    """pool uint8 [S, bytes of a record] at rows int64 [P] -> bfloat16 [P, dim]. Raises as `write_records`."""
    result: Tensor = _read_records(pool, rows, dim, kind)
    return result


def exchange_records(
    pool: Tensor, prior_rows: Tensor, kept_rows: Tensor, rows: Tensor, values: Tensor, kind: str
) -> Tensor:
    """read_records(pool, prior_rows) and behind them `values` -> bfloat16 [P + T, dim]; then values[kept_rows] are
    written at `rows`, as many. Raises as `write_records`."""
    result: Tensor = _exchange_records(pool, prior_rows, kept_rows, rows, values, kind)
    return result


def round_index(x: Tensor) -> Tensor:
    """Round bfloat16 [..., D] as an "index" record does, and back. x contiguous, D a multiple of 32."""
    result: Tensor = _round_index(x)
    return result


_write_records, _read_records = ops.write_records.default, ops.read_records.default
_exchange_records, _round_index = ops.exchange_records.default, ops.round_index.default
fake("sgl_kernel_ext::write_records", lambda pool, rows, values, kind: None)
fake(
    "sgl_kernel_ext::read_records",
    lambda pool, rows, dim, kind: pool.new_empty((rows.shape[0], dim), dtype=torch.bfloat16),
)
fake(
    "sgl_kernel_ext::exchange_records",
    lambda pool, prior, kept, rows, values, kind: values.new_empty((prior.shape[0] + values.shape[0], values.shape[1])),
)
fake("sgl_kernel_ext::round_index", torch.empty_like)
