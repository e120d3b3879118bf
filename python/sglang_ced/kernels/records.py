"""Cache rows: quantise-and-store, gather-and-dequantise (architecture.md 6.1; layouts: `formats.Record`)."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ced import formats
from sglang_ced.formats import Record
from sglang_ced.kernels.registry import joined, op


@op
def write_records(pool: Tensor, rows: Tensor, values: Tensor, record: Record) -> None:
    """Store values bfloat16 [P, dim] at rows int64 [P] of pool uint8 [S, record.nbytes]. Rows do not repeat."""
    pool[rows] = record.encode(values)


@op
def read_records(pool: Tensor, rows: Tensor, record: Record) -> Tensor:
    """pool uint8 [S, record.nbytes] at rows int64 [P] -> bfloat16 [P, dim]."""
    return record.decode(pool[rows])


@joined
def exchange_records(
    pool: Tensor, prior_rows: Tensor, kept_rows: Tensor, rows: Tensor, values: Tensor, record: Record
) -> Tensor:
    """pool's records at prior_rows int64 [P], and behind them values bfloat16 [T, dim] -> bfloat16 [P + T, dim]; then
    values[kept_rows] are stored at rows, both int64 [K]. Neither list repeats."""
    prior = read_records(pool, prior_rows, record)
    write_records(pool, rows, values[kept_rows], record)
    return torch.cat((prior, values))


@op
def round_index(x: Tensor) -> Tensor:
    """bfloat16 [..., D] rounded to e2m1 with a ue8m0 scale per 32, and back: what index queries and keys are."""
    return formats.fake_quant_e2m1_ue8m0(x)
