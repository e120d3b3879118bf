"""Twin of test/kernels/test_rows.py and test_records.py, at a hidden size of 1024 and four streams."""

from __future__ import annotations

import pytest
import torch

from sglang_ced.formats import Record
from sglang_ced.kernels import cpu, engram, mhc, norm, records, rope

N, D, EPS = 4, 1024, 1e-20
ROWS = [1, 512]


def streams(rows: int) -> torch.Tensor:
    return torch.randn(rows, N, D).to(torch.bfloat16)


@pytest.mark.parametrize("rows", ROWS)
def test_bench_rms_norm(compare, rows: int) -> None:
    args = (torch.randn(rows, D).to(torch.bfloat16), torch.ones(D, dtype=torch.bfloat16), EPS)
    compare(f"rms_norm rows={rows}", norm.rms_norm.reference, cpu.rms_norm, *args)


@pytest.mark.parametrize("rows", ROWS)
def test_bench_rotate(compare, rows: int) -> None:
    cos, sin = rope.angles(torch.arange(rows), rope.frequencies(64, 10000.0))
    x = torch.randn(rows, 16, 256).to(torch.bfloat16)
    compare(f"rotate rows={rows}", rope.rotate.reference, cpu.rotate, x, cos, sin)


@pytest.mark.parametrize("rows", ROWS)
def test_bench_mixes(compare, rows: int) -> None:
    site = (torch.randn(24, N * D) / (N * D) ** 0.5, torch.randn(24), torch.randn(3), 20, 1e-6)
    compare(f"mixes rows={rows}", mhc.mixes.reference, cpu.mixes, streams(rows), *site)


@pytest.mark.parametrize("rows", ROWS)
def test_bench_collapse(compare, rows: int) -> None:
    compare(f"collapse rows={rows}", mhc.collapse.reference, cpu.collapse, streams(rows), torch.rand(rows, N))


@pytest.mark.parametrize("rows", ROWS)
def test_bench_expand(compare, rows: int) -> None:
    y = torch.randn(rows, D).to(torch.bfloat16)
    args = (y, streams(rows), torch.rand(rows, N), torch.rand(rows, N, N))
    compare(f"expand rows={rows}", mhc.expand.reference, cpu.expand, *args)


@pytest.mark.parametrize("rows", ROWS)
def test_bench_fuse(compare, rows: int) -> None:
    args = (streams(rows), torch.randn(rows, (N + 1) * D).to(torch.bfloat16), torch.randn(N, D), EPS)
    compare(f"fuse rows={rows}", engram.fuse.reference, cpu.fuse, *args)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["global", "index", "window", "global_bf16", "index_bf16"])
def test_bench_write_records(compare, kind, rows: int) -> None:
    record, values = Record(256, kind), torch.randn(rows, 256).to(torch.bfloat16)
    pool = torch.zeros(4096, record.nbytes, dtype=torch.uint8)
    versions = (records.write_records.reference, cpu.write_records)
    compare(f"write {kind} rows={rows}", *versions, pool, torch.randperm(4096)[:rows], values, record)


@pytest.mark.parametrize("rows", ROWS)
def test_bench_read_records(compare, rows: int) -> None:
    record = Record(256, "window")
    pool = torch.zeros(4096, record.nbytes, dtype=torch.uint8)
    versions = (records.read_records.reference, cpu.read_records)
    compare(f"read window rows={rows}", *versions, pool, torch.randperm(4096)[:rows], record)
