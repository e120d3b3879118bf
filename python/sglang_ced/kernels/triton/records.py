"""Packed cache rows: a program quantises and stores, or gathers and dequantises, one of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_ced.formats import BLOCK, KV_BLOCK, Record
from sglang_ced.kernels import records
from sglang_ced.kernels.triton.numbers import (
    e2m1_code,
    e2m1_exponent,
    e2m1_value,
    e4m3_code,
    e4m3_exponent,
    e4m3_value,
    fake_e2m1,
    largest,
    narrow,
    power_of_two,
    round_e4m3,
    ue8m0_value,
    widen,
)

GLOBAL, INDEX, WINDOW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
KINDS = {"global": 0, "index": 1, "window": 2, "global_bf16": 0, "index_bf16": 1}
ROUND_ROWS = 32  # blocks of 32 per program


@triton.jit
def _write(
    pool: tl.tensor,
    rows: tl.tensor,
    values: tl.tensor,
    stride: tl.tensor,
    D: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    record = pool + tl.load(rows + i) * stride
    block, column = tl.arange(0, BLOCKS)[:, None], tl.arange(0, WIDTH)[None, :]
    place = block * WIDTH + column
    x = widen(tl.load(values + i * D + place, mask=place < D, other=0.0))
    amax = largest(x)
    if KIND == GLOBAL:
        amax = tl.maximum(amax, 0.01171875)  # 6 * 2^-9
        scale = round_e4m3(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)))
        scale_code = e4m3_code(scale)
        code = e2m1_code(tl.div_rn(x, tl.broadcast_to(scale, x.shape)))
    else:
        exponent = e4m3_exponent(amax) if KIND == WINDOW else e2m1_exponent(amax)
        scale, scale_code = power_of_two(exponent), exponent + 127
        scaled = x * power_of_two(-exponent)
        code = e4m3_code(round_e4m3(scaled)) if KIND == WINDOW else e2m1_code(scaled)
    if pool.dtype.element_ty == tl.bfloat16:
        tl.store(record + place, narrow(e2m1_value(code) * scale, tl.bfloat16), mask=place < D)
    elif KIND == WINDOW:
        tl.store(record + place, code.to(tl.uint8), mask=place < D)
        tl.store(record + D + block, scale_code.to(tl.uint8), mask=block * WIDTH < D)
    else:
        even, odd = tl.split(code.reshape(BLOCKS, WIDTH // 2, 2))
        byte = block * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
        tl.store(record + byte, (even | (odd << 4)).to(tl.uint8), mask=byte < D // 2)
        tl.store(record + D // 2 + block, scale_code.to(tl.uint8), mask=block * WIDTH < D)


@records.write_records.register("triton")
def write_records(pool: Tensor, rows: Tensor, values: Tensor, record: Record) -> None:
    width = KV_BLOCK if KINDS[record.kind] == GLOBAL.value else BLOCK
    if values.shape != (len(rows), record.dim) or record.dim % width:
        raise ValueError(f"values of shape {list(values.shape)}: {len(rows)} rows of {record.dim}, blocks of {width}")
    plain = _plain(pool, record)
    if values.dtype != torch.bfloat16 or plain is None:
        return records.write_records.reference(pool, rows, values, record)
    if len(rows):
        _write[(len(rows),)](
            plain, rows.contiguous(), values.contiguous(), plain.stride(0), record.dim, KINDS[record.kind], width,
            triton.next_power_of_2(record.dim // width), num_warps=1,
        )  # fmt: skip
    return None


def _plain(pool: Tensor, record: Record) -> Tensor | None:
    """The pool as the kernels take it: bytes, or bfloat16 for records of that; None if its rows lie otherwise.

    Raises ValueError for rows of another width.
    """
    if pool.dim() != 2 or pool.shape[1] != record.nbytes:
        raise ValueError(
            f"pool of shape {list(pool.shape)}: {record.kind} records of {record.dim} have {record.nbytes}"
        )
    if pool.stride(1) != 1:
        return None
    if record.scale_bytes:
        return pool
    return None if pool.stride(0) % 2 or pool.storage_offset() % 2 else pool.view(torch.bfloat16)


@triton.jit
def _read(
    pool: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    stride: tl.tensor,
    D: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    i = tl.program_id(0).to(tl.int64)
    record = pool + tl.load(rows + i) * stride
    block, column = tl.arange(0, BLOCKS)[:, None], tl.arange(0, WIDTH)[None, :]
    place = block * WIDTH + column
    codes: tl.constexpr = D if KIND == WINDOW else D // 2
    scale_code = tl.load(record + codes + block, mask=block * WIDTH < D, other=0)
    if KIND == WINDOW:
        value = e4m3_value(tl.load(record + place, mask=place < D, other=0))
    else:
        byte = block * (WIDTH // 2) + tl.arange(0, WIDTH // 2)[None, :]
        pairs = tl.load(record + byte, mask=byte < codes, other=0)
        value = tl.join(e2m1_value(pairs), e2m1_value(pairs >> 4)).reshape(BLOCKS, WIDTH)
    scale = e4m3_value(scale_code) if KIND == GLOBAL else ue8m0_value(scale_code)
    tl.store(out + i * D + place, narrow(value * scale, tl.bfloat16), mask=place < D)


@records.read_records.register("triton")
def read_records(pool: Tensor, rows: Tensor, record: Record) -> Tensor:
    plain = _plain(pool, record)
    if plain is None or not record.scale_bytes:  # of bfloat16: a gather, which torch has
        return records.read_records.reference(pool, rows, record)
    width = KV_BLOCK if record.kind == "global" else BLOCK
    out = torch.empty(len(rows), record.dim, dtype=torch.bfloat16, device=pool.device)
    if len(rows):
        _read[(len(rows),)](
            plain, rows.contiguous(), out, plain.stride(0), record.dim, KINDS[record.kind], width,
            triton.next_power_of_2(record.dim // width), num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _round_index(x: tl.tensor, out: tl.tensor, blocks: tl.tensor, ROWS: tl.constexpr) -> None:
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    place = block.to(tl.int64) * 32 + tl.arange(0, 32)[None, :]
    values = widen(tl.load(x + place, mask=block < blocks, other=0.0))
    tl.store(out + place, narrow(fake_e2m1(values), tl.bfloat16), mask=block < blocks)


@records.round_index.register("triton")
def round_index(x: Tensor) -> Tensor:
    if x.dtype != torch.bfloat16 or x.shape[-1] % BLOCK:
        return records.round_index.reference(x)
    x = x.contiguous()
    out, blocks = torch.empty_like(x), x.numel() // BLOCK
    if blocks:
        _round_index[(triton.cdiv(blocks, ROUND_ROWS),)](x, out, blocks, ROUND_ROWS)
    return out
