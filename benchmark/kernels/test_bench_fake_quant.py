"""Twin of test/kernels/test_sgl_kernel_ext.py: block quantisation per CPU level, beside plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sgl_kernel_ext

# One decoding token, a batch of them, and a prefill chunk, at the hidden size of the released model.
SHAPES = [(1, 5120), (16, 5120), (2048, 5120)]


def plain_torch(x: Tensor) -> Tensor:
    blocks = x.float().unflatten(-1, (-1, 32))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448.0)
    scale = torch.exp2(torch.where(mantissa == 0.5, exponent - 1, exponent).float())
    codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).to(torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("version", ["torch", *sgl_kernel_ext.supported_cpu_capabilities()])
def test_bench_fake_quant_e4m3(benchmark, version: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    benchmark.group = f"fake_quant_e4m3 {shape}"
    benchmark.extra_info["threads"] = torch.get_num_threads()
    if version == "torch":
        benchmark(plain_torch, x)
        return
    sgl_kernel_ext.force_cpu_capability(version)
    try:
        benchmark(sgl_kernel_ext.fake_quant_e4m3, x)
    finally:
        sgl_kernel_ext.force_cpu_capability(None)
