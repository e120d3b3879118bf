"""Twin of test/kernels/test_linear.py: one token, a batch of them, and a prefill chunk by one weight."""

from __future__ import annotations

import pytest
import torch

from sglang_ced.formats import E2m1Weight, E4m3Weight, quantize_e2m1_ue8m0, quantize_weight_e4m3
from sglang_ced.kernels import cpu, linear

N, K = 1024, 1024


def weight_of(kind: str):
    value = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) / K**0.5
    if kind == "e4m3":
        return E4m3Weight(*quantize_weight_e4m3(value)), N * K
    if kind == "e2m1":
        return E2m1Weight(*quantize_e2m1_ue8m0(value)), N * K // 2
    return value.to(torch.bfloat16), 2 * N * K


@pytest.mark.parametrize("rows", [1, 8, 512])
@pytest.mark.parametrize("kind", ["e4m3", "e2m1", "bfloat16"])
def test_bench_linear(compare, kind: str, rows: int) -> None:
    x = torch.randn(rows, K).to(torch.bfloat16)
    weight, nbytes = weight_of(kind)
    case = f"linear {kind} rows={rows}"
    compare(case, linear.linear.reference, cpu.linear_, x, weight, macs=rows * N * K, nbytes=nbytes)


@pytest.mark.parametrize("rows", [1, 8, 512])
def test_bench_grouped_linear(compare, rows: int) -> None:
    x = torch.randn(rows, 4 * K).to(torch.bfloat16)
    weight, nbytes = weight_of("e4m3")
    case, versions = f"grouped_linear rows={rows}", (linear.grouped_linear.reference, cpu.grouped_linear)
    compare(case, *versions, x, weight, 4, macs=rows * N * K, nbytes=nbytes)
