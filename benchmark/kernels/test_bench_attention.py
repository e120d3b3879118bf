"""Twin of test/kernels/test_attention.py: a window of 128 rows and 512 groups, packed or as bfloat16."""

from __future__ import annotations

import pytest
import torch

from sglang_ced.formats import Record
from sglang_ced.kernels import attention, cpu

HEADS, DIM, WINDOW, GROUPS, SLOTS = 16, 256, 128, 512, 4096


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("kind", ["global", "global_bf16"])
def test_bench_attend(compare, kind, rows: int) -> None:
    q, window = (torch.randn(s).to(torch.bfloat16) for s in ((rows, HEADS, DIM), (WINDOW + rows, DIM)))
    pool = Record(DIM, kind).encode(torch.randn(SLOTS, DIM))
    near = torch.arange(rows)[:, None] + torch.arange(WINDOW)
    far = torch.rand(rows, SLOTS).argsort(1)[:, :GROUPS].sort(1).values + len(window)
    args = (q, window, pool, torch.cat((near, far), 1), torch.randn(HEADS))
    macs = 2 * rows * HEADS * DIM * (WINDOW + GROUPS)
    compare(f"attend {kind} rows={rows}", attention.attend.reference, cpu.attend, *args, macs=macs)
