"""Products with bfloat16, fp8 and fp4 weights: one kernel from a single row to many, weights decoded in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ced.formats import BLOCK, E2m1Weight, E4m3Weight, Weight
from sglang_ced.kernels import linear
from sglang_ced.kernels.triton.numbers import dot, e2m1_value, e4m3_value, fake_e4m3, narrow, ue8m0_value, widen

PLAIN, E4M3, E2M1 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
ROUND_ROWS = 32  # blocks of 32 per program
FUSED_ROWS = 16  # up to here the product rounds its own input; above, a kernel of its own does it once


# -- rounding of the input --------------------------------------------------------------------------------------------


@triton.jit
def _round_input(x: tl.tensor, out: tl.tensor, blocks: tl.tensor, ROWS: tl.constexpr) -> None:
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    place = block.to(tl.int64) * 32 + tl.arange(0, 32)[None, :]
    values = widen(tl.load(x + place, mask=block < blocks, other=0.0))
    tl.store(out + place, narrow(fake_e4m3(values), out.dtype.element_ty), mask=block < blocks)


@linear.round_input.register("triton")
def round_input(x: Tensor) -> Tensor:
    if x.shape[-1] % BLOCK or x.dtype not in (torch.bfloat16, torch.float32):
        return linear.round_input.reference(x)
    x = x.contiguous()
    out, blocks = torch.empty_like(x), x.numel() // BLOCK
    if blocks:
        _round_input[(triton.cdiv(blocks, ROUND_ROWS),)](x, out, blocks, ROUND_ROWS)
    return out


# -- weight tiles -----------------------------------------------------------------------------------------------------


@triton.jit
def weight_tile(
    codes: tl.tensor,
    scales: tl.tensor,
    n: tl.tensor,
    k: tl.tensor,
    K: tl.tensor,
    is_row: tl.tensor,
    FORM: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Rows n int64 [N] and columns [k, k + COLUMNS) of a weight [.., K] -> [N, COLUMNS], zero outside.

    bfloat16, which holds every stored value exactly; a plain weight comes in its own dtype.
    """
    column = k + tl.arange(0, COLUMNS)
    inside = is_row[:, None] & (column < K)[None, :]
    if FORM == PLAIN:
        return tl.load(codes + n[:, None] * K + column[None, :], mask=inside, other=0.0)
    elif FORM == E4M3:
        value = e4m3_value(tl.load(codes + n[:, None] * K + column[None, :], mask=inside, other=0))
        return _scaled(value, scales, n // 32, k, K, is_row)
    else:
        byte = k // 2 + tl.arange(0, COLUMNS // 2)
        inside = is_row[:, None] & (byte < K // 2)[None, :]
        pairs = tl.load(codes + n[:, None] * (K // 2) + byte[None, :], mask=inside, other=0)
        value = tl.join(e2m1_value(pairs), e2m1_value(pairs >> 4)).reshape(n.shape[0], COLUMNS)
        return _scaled(value, scales, n, k, K, is_row)


@triton.jit
def _scaled(
    value: tl.tensor, scales: tl.tensor, scale_row: tl.tensor, k: tl.tensor, K: tl.tensor, is_row: tl.tensor
) -> tl.tensor:
    """float32 [N, C] at column k, times the ue8m0 scale of each 32 columns -> bfloat16."""
    ROWS: tl.constexpr = value.shape[0]
    BLOCKS: tl.constexpr = value.shape[1] // 32
    block = k // 32 + tl.arange(0, BLOCKS)
    inside = is_row[:, None] & (block < K // 32)[None, :]
    scale = ue8m0_value(tl.load(scales + scale_row[:, None] * (K // 32) + block[None, :], mask=inside, other=0))
    scaled = value.reshape(ROWS, BLOCKS, 32) * scale[:, :, None]
    return narrow(scaled.reshape(ROWS, 32 * BLOCKS), tl.bfloat16)


@triton.jit
def input_tile(
    x: tl.tensor,
    rows: tl.tensor,
    k: tl.tensor,
    K: tl.tensor,
    is_row: tl.tensor,
    ROUND: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Columns [k, k + WIDTH) of the rows that start at offsets `rows` int64 [M] of x -> [M, WIDTH], zero outside."""
    ROWS: tl.constexpr = rows.shape[0]
    column = k + tl.arange(0, WIDTH)
    values = tl.load(x + rows[:, None] + column[None, :], mask=is_row[:, None] & (column < K)[None, :], other=0.0)
    if ROUND:
        blocks = widen(values).reshape(ROWS, WIDTH // 32, 32)
        values = narrow(fake_e4m3(blocks).reshape(ROWS, WIDTH), tl.bfloat16)
    return values


# -- product ----------------------------------------------------------------------------------------------------------


@triton.jit
def _product(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    x_stride: tl.tensor,
    FORM: tl.constexpr,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Group g of x [M, groups * K] by group g of the weight's rows [groups * N, K] -> out [M, groups * N]."""
    group, groups = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row, weight_row = m.to(tl.int64) * x_stride + group * K, group * N + n
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(0, K, WIDTH):
        a = input_tile(x, row, k, K, m < M, ROUND, WIDTH)
        b = weight_tile(codes, scales, weight_row, k, K, n < N, FORM, WIDTH)
        if x.dtype.element_ty == tl.float32 or b.dtype == tl.float32:
            a, b = widen(a), widen(b)
        total = dot(a, tl.trans(b), total)
    place = m.to(tl.int64)[:, None] * (N * groups) + weight_row[None, :]
    tl.store(out + place, narrow(total, out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def tile(rows: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a product's tile: few rows stream the weight through many programs."""
    if rows <= 16:
        return 16, 32, 4
    if rows <= 64:
        return 32, 64, 4
    return 64, 128, 8


def _run(x: Tensor, weight: Weight, out_dtype: torch.dtype, groups: int, rounds: bool) -> Tensor:
    codes, scales, form = stored(weight)
    n, k = weight.shape[0] // groups, weight.shape[1]
    if x.shape[-1] != groups * k:
        raise ValueError(f"x of shape {list(x.shape)} does not fit a weight of shape {list(weight.shape)}")
    if form != PLAIN.value and k % BLOCK:
        raise ValueError(f"a stored weight of shape {list(weight.shape)}: its inputs are no multiple of {BLOCK}")
    rows = x.reshape(-1, groups * k)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    if rounds and len(rows) > FUSED_ROWS:
        rows, rounds = round_input(rows), False
    out = torch.empty(len(rows), groups * n, dtype=out_dtype, device=x.device)
    tile_rows, columns, warps = tile(len(rows))
    wide = torch.float32 in (x.dtype, codes.dtype)  # multiplied outside the tensor cores
    width = 32 if wide else 128 if len(rows) <= 16 else 64
    if wide:
        tile_rows, columns = min(tile_rows, 32), 32
    if isinstance(weight, Tensor) and out_dtype == torch.float32:
        warps = 4  # ptxas gives eight of them too few registers on sm_100
    grid = (triton.cdiv(n, columns), triton.cdiv(len(rows), tile_rows), groups)
    if out.numel():
        _product[grid](
            rows, codes, scales, out, len(rows), n, k, rows.stride(0), form, rounds, tile_rows, columns, width,
            num_warps=warps, num_stages=3,
        )  # fmt: skip
    return out.unflatten(0, x.shape[:-1]) if x.dim() != 2 else out


def stored(weight: Weight) -> tuple[Tensor, Tensor | None, int]:
    """(codes, scales, form) of a weight, contiguous."""
    if isinstance(weight, E4m3Weight):
        return weight.codes.contiguous(), weight.scales.contiguous(), E4M3.value
    if isinstance(weight, E2m1Weight):
        return weight.packed.contiguous(), weight.scales.contiguous(), E2M1.value
    return weight.contiguous(), None, PLAIN.value


def _is_wide(*tensors: Tensor) -> bool:
    """Whether any is of a dtype that only the references take (float64, float16)."""
    return any(t.dtype not in (torch.bfloat16, torch.float32) for t in tensors)


@linear.linear.register("triton")
def linear_(x: Tensor, weight: Weight) -> Tensor:
    if isinstance(weight, Tensor) and _is_wide(x, weight):
        return linear.linear.reference(x, weight)
    return _run(x, weight, torch.bfloat16, 1, rounds=not isinstance(weight, Tensor))


@linear.matmul.register("triton")
def matmul(x: Tensor, weight: Tensor) -> Tensor:
    if _is_wide(x, weight):
        return linear.matmul.reference(x, weight)
    return _run(x, weight, torch.float32, 1, rounds=False)


@linear.grouped_linear.register("triton")
def grouped_linear(x: Tensor, weight: Weight, groups: int) -> Tensor:
    return _run(x, weight, torch.bfloat16, groups, rounds=False)
