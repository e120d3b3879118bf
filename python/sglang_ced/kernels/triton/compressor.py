"""Pairs of tokens pooled per channel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ced.kernels import compressor
from sglang_ced.kernels.triton.numbers import UNFUSED, narrow

BLOCK = 512


@triton.jit
def _pool_pairs(
    kv: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    D: tl.tensor,
    kv_pair: tl.tensor,
    kv_token: tl.tensor,
    gate_pair: tl.tensor,
    gate_token: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    pair, d = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(gate + pair * gate_pair + d, mask=d < D, other=0.0).to(tl.float64)
    second = tl.load(gate + pair * gate_pair + gate_token + d, mask=d < D, other=0.0).to(tl.float64)
    top = tl.maximum(first, second)
    first, second = tl.exp(first - top), tl.exp(second - top)
    total = first + second
    first, second = (first / total).to(tl.float32), (second / total).to(tl.float32)
    pooled = first * tl.load(kv + pair * kv_pair + d, mask=d < D, other=0.0)
    pooled += second * tl.load(kv + pair * kv_pair + kv_token + d, mask=d < D, other=0.0)
    tl.store(out + pair * D + d, narrow(pooled, tl.bfloat16), mask=d < D)


@compressor.pool_pairs.register("triton")
def pool_pairs(kv: Tensor, gate: Tensor) -> Tensor:
    if kv.dtype != torch.float32 or gate.dtype != torch.float32:
        return compressor.pool_pairs.reference(kv, gate)
    kv, gate = (x if x.stride(-1) == 1 else x.contiguous() for x in (kv, gate))
    pairs, _, dim = kv.shape
    out = torch.empty(pairs, dim, dtype=torch.bfloat16, device=kv.device)
    if out.numel():
        strides = (kv.stride(0), kv.stride(1), gate.stride(0), gate.stride(1))
        _pool_pairs[(triton.cdiv(dim, BLOCK), pairs)](kv, gate, out, dim, *strides, BLOCK, **UNFUSED)
    return out
