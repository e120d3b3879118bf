"""Rotation of adjacent pairs, each product and each sum rounded as in the reference."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ced.kernels import rope
from sglang_ced.kernels.triton.numbers import UNFUSED, narrow, widen

HEADS = 8  # of a program


@triton.jit
def _rotate(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    D: tl.tensor,
    KEPT: tl.constexpr,
    PAIRS: tl.constexpr,
    KEPT_SLOTS: tl.constexpr,
    PAIR_SLOTS: tl.constexpr,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    start, is_head = ((row * heads + head) * D)[:, None], (head < heads)[:, None]
    pair = tl.arange(0, PAIR_SLOTS)
    c = tl.load(cos + row * PAIRS + pair, mask=pair < PAIRS, other=0.0)[None, :]
    s = tl.load(sin + row * PAIRS + pair, mask=pair < PAIRS, other=0.0)[None, :]
    if INVERSE:
        s = -s
    place, inside = start + KEPT + 2 * pair[None, :], is_head & (pair < PAIRS)[None, :]
    even, odd = widen(tl.load(x + place, mask=inside)), widen(tl.load(x + place + 1, mask=inside))
    tl.store(out + place, narrow(even * c - odd * s, tl.bfloat16), mask=inside)
    tl.store(out + place + 1, narrow(even * s + odd * c, tl.bfloat16), mask=inside)
    if KEPT > 0:
        kept = tl.arange(0, KEPT_SLOTS)[None, :]
        tl.store(
            out + start + kept, tl.load(x + start + kept, mask=is_head & (kept < KEPT)), mask=is_head & (kept < KEPT)
        )


@rope.rotate.register("triton")
def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    if x.dtype != torch.bfloat16 or cos.dtype != torch.float32:
        return rope.rotate.reference(x, cos, sin, inverse)
    rows, dim, pairs = x.shape[0], x.shape[-1], cos.shape[-1]
    if cos.shape != sin.shape or len(cos) != rows or 2 * pairs > dim:
        raise ValueError(f"x of shape {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)} do not fit")
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        heads, kept = x.numel() // (rows * dim), dim - 2 * pairs
        slots = [triton.next_power_of_2(max(1, n)) for n in (kept, pairs)]
        _rotate[(rows, triton.cdiv(heads, HEADS))](
            x, cos.contiguous(), sin.contiguous(), out, heads, dim, kept, pairs, *slots, inverse, HEADS, **UNFUSED
        )
    return out
