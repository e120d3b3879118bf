"""Twin of test/kernels/test_moe.py: gate and experts for one token, a batch of them, and a prefill chunk."""

from __future__ import annotations

import pytest
import torch

from sglang_ced.formats import E2m1Weight, E4m3Weight, quantize_e2m1_ue8m0, quantize_weight_e4m3
from sglang_ced.kernels import cpu, moe

D, INNER, EXPERTS, TOP_K = 1024, 512, 32, 6


def expert(index: int, shared: bool = False) -> moe.ExpertWeights:
    generator = torch.Generator().manual_seed(index)
    values = (torch.randn(s, generator=generator) / s[1] ** 0.5 for s in ((INNER, D), (D, INNER), (INNER, D)))
    if shared:
        return moe.ExpertWeights(*(E4m3Weight(*quantize_weight_e4m3(v)) for v in values))
    return moe.ExpertWeights(*(E2m1Weight(*quantize_e2m1_ue8m0(v)) for v in values))


@pytest.fixture(scope="module")
def experts() -> tuple[moe.Experts, moe.ExpertWeights]:
    return moe.Experts(expert(e) for e in range(EXPERTS)), expert(EXPERTS, shared=True)


@pytest.mark.parametrize("rows", [1, 8, 512])
def test_bench_mixture(compare, experts, rows: int) -> None:
    x = torch.randn(rows, D).to(torch.bfloat16)
    chosen = torch.rand(rows, EXPERTS).argsort(1)[:, :TOP_K]
    args = (x, chosen, torch.rand(rows, TOP_K), *experts, 10.0)
    used = len(chosen.unique())
    nbytes, macs = 3 * D * INNER * (used // 2 + 1), 3 * D * INNER * rows * (TOP_K + 1)
    compare(f"mixture rows={rows}", moe.mixture.reference, cpu.mixture, *args, macs=macs, nbytes=nbytes)


@pytest.mark.parametrize("rows", [1, 512])
def test_bench_route(compare, rows: int) -> None:
    x, weight = torch.randn(rows, D).to(torch.bfloat16), torch.randn(384, D).to(torch.bfloat16)
    args = (x, weight, torch.zeros(384), TOP_K, 1.5)
    compare(f"route rows={rows}", moe.route.reference, cpu.route, *args, macs=384 * D * rows)
