"""Number formats of the checkpoint and of the caches: round, pack, unpack. Imports nothing of ours.

Three block formats, all along the last dimension (architecture.md 4.1 and 6.1):

    e4m3 / ue8m0, 32   activations and window KV;  scale = 2^ceil(log2(max(amax, 1e-4) / 448))
    e2m1 / ue8m0, 32   index queries and keys;     scale = 2^ceil(log2(max(amax, 6 * 2^-126) / 6))
    e2m1 / e4m3,  16   global KV;                  scale = e4m3(max(amax, 6 * 2^-9) / 6)

Weights use e4m3 with one ue8m0 scale per 32x32 tile, or packed e2m1 with one per 32 inputs. A ue8m0 byte b means
2^(b-127); two e2m1 codes share a byte, the even index in the low nibble. Codes travel as uint8, so that they survive
any copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 32
KV_BLOCK = 16

# -- scales -----------------------------------------------------------------------------------------------------------


def ceil_exponent(x: Tensor) -> Tensor:
    """ceil(log2(x)) as int32 for positive finite float32, exactly (no logarithm is taken)."""
    mantissa, exponent = torch.frexp(x)
    return torch.where(mantissa == 0.5, exponent - 1, exponent).to(torch.int32)


def ue8m0_to_float(code: Tensor) -> Tensor:
    """uint8 -> float32 power of two; byte 255 is NaN."""
    bits = code.to(torch.int32) << 23  # the byte is the exponent field of a float32 ...
    bits = torch.where(code == 0, 1 << 22, bits)  # ... but for 2^-127, which is subnormal,
    return torch.where(code == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)  # and for NaN


def _ue8m0_scale(amax: Tensor, floor: float, largest: float) -> tuple[Tensor, Tensor]:
    """Power-of-two scale, rounded up. Returns (uint8 code, float32 scale), shape of `amax`."""
    exponent = ceil_exponent(amax.clamp_min(floor) / largest).clamp(-127, 127)
    code = (exponent + 127).to(torch.uint8)
    return code, ue8m0_to_float(code)


def _blocks(x: Tensor, block: int) -> Tensor:
    if x.shape[-1] % block:
        raise ValueError(f"last dimension {x.shape[-1]} is not a multiple of the block of {block}")
    blocks: Tensor = x.to(torch.float32).unflatten(-1, (-1, block))
    return blocks


# -- e4m3 -------------------------------------------------------------------------------------------------------------


def quantize_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] float -> (codes uint8 [..., K], ue8m0 scales uint8 [..., K/32]). Raises ValueError if K % 32."""
    blocks = _blocks(x, BLOCK)
    code, scale = _ue8m0_scale(blocks.abs().amax(-1), 1e-4, E4M3_MAX)
    scaled = (blocks / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2), code


def dequantize_e4m3(codes: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `quantize_e4m3`, float32 [..., K]."""
    value = _blocks(codes.contiguous().view(torch.float8_e4m3fn), BLOCK)
    return (value * ue8m0_to_float(scales).unsqueeze(-1)).flatten(-2)


# -- e2m1 -------------------------------------------------------------------------------------------------------------


def _round_e2m1(x: Tensor) -> Tensor:
    """float32 -> uint8 e2m1 codes, nearest, ties to the even mantissa, saturating at 6."""
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    for bound, inclusive in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (a >= bound) if inclusive else (a > bound)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def pack_e2m1(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] (values 0-15) -> bytes [..., K/2], even index in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """bytes [..., K/2] (uint8 or int8) -> float32 values [..., K]. Code 8 is -0."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=packed.device)
    raw = packed.contiguous().view(torch.uint8)
    return table[torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2).int()]


def quantize_e2m1_ue8m0(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] float -> (packed uint8 [..., K/2], ue8m0 scales uint8 [..., K/32]). Raises ValueError if K % 32."""
    blocks = _blocks(x, BLOCK)
    code, scale = _ue8m0_scale(blocks.abs().amax(-1), E2M1_MAX * 2.0**-126, E2M1_MAX)
    return pack_e2m1(_round_e2m1(blocks / scale.unsqueeze(-1)).flatten(-2)), code


def dequantize_e2m1_ue8m0(packed: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `quantize_e2m1_ue8m0`, float32 [..., K]."""
    value = _blocks(unpack_e2m1(packed), BLOCK)
    return (value * ue8m0_to_float(scales).unsqueeze(-1)).flatten(-2)


def quantize_e2m1_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] float -> (packed uint8 [..., K/2], e4m3 scales uint8 [..., K/16]). Raises ValueError if K % 16."""
    blocks = _blocks(x, KV_BLOCK)
    amax = blocks.abs().amax(-1).clamp_min(E2M1_MAX * 2.0**-9)
    scale = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    packed = pack_e2m1(_round_e2m1(blocks / scale.to(torch.float32).unsqueeze(-1)).flatten(-2))
    return packed, scale.view(torch.uint8)


def dequantize_e2m1_e4m3(packed: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `quantize_e2m1_e4m3`, float32 [..., K]."""
    scale = scales.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    return (_blocks(unpack_e2m1(packed), KV_BLOCK) * scale.unsqueeze(-1)).flatten(-2)


# -- quantise and come back -------------------------------------------------------------------------------------------


def fake_quant_e4m3(x: Tensor) -> Tensor:
    """Round to e4m3 / ue8m0 per 32 and back, in the dtype of `x`."""
    return dequantize_e4m3(*quantize_e4m3(x)).to(x.dtype)


def fake_quant_e2m1_ue8m0(x: Tensor) -> Tensor:
    """Round to e2m1 / ue8m0 per 32 and back, in the dtype of `x`."""
    return dequantize_e2m1_ue8m0(*quantize_e2m1_ue8m0(x)).to(x.dtype)


def fake_quant_e2m1_e4m3(x: Tensor) -> Tensor:
    """Round to e2m1 / e4m3 per 16 and back, in the dtype of `x`."""
    return dequantize_e2m1_e4m3(*quantize_e2m1_e4m3(x)).to(x.dtype)


# -- weights ----------------------------------------------------------------------------------------------------------


def quantize_weight_e4m3(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] float -> (codes uint8 [N, K], ue8m0 scales uint8 [ceil(N/32), ceil(K/32)]), one scale per 32x32 tile."""
    n, k = weight.shape
    rows, cols = -(-n // BLOCK), -(-k // BLOCK)
    padded = torch.zeros(rows * BLOCK, cols * BLOCK, dtype=torch.float32)
    padded[:n, :k] = weight
    tiles = padded.view(rows, BLOCK, cols, BLOCK)
    code, scale = _ue8m0_scale(tiles.abs().amax((1, 3)), 1e-4, E4M3_MAX)
    scaled = (tiles / scale[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).view_as(padded)[:n, :k]
    return scaled.contiguous().to(torch.float8_e4m3fn).view(torch.uint8), code


def dequantize_weight_e4m3(codes: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `quantize_weight_e4m3`, float32 [N, K]; `codes` and `scales` as uint8 or in their float8 dtypes."""
    n, k = codes.shape
    value = codes.view(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    scale = ue8m0_to_float(scales.view(torch.uint8))
    return value * scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]


def dequantize_weight_e2m1(packed: Tensor, scales: Tensor) -> Tensor:
    """Packed e2m1 [N, K/2] with ue8m0 scales [N, K/32] -> float32 [N, K]; int8, uint8 or float8 dtypes."""
    return dequantize_e2m1_ue8m0(packed, scales.view(torch.uint8))


# -- records ----------------------------------------------------------------------------------------------------------


RecordKind = Literal["global", "index", "window", "global_bf16", "index_bf16"]

# What a bfloat16 record is rounded as before it is stored.
_PACKED: dict[str, RecordKind] = {"global_bf16": "global", "index_bf16": "index"}
_BLOCK_OF = {"global": KV_BLOCK, "index": BLOCK, "window": BLOCK}


@dataclass(frozen=True)
class Record:
    """One cached vector of `dim` values as bytes. The one place that knows cache layouts.

    kind: "global" (e2m1 + e4m3 per 16), "index" (e2m1 + ue8m0 per 32), "window" (e4m3 + ue8m0 per 32): codes, then
    scales. "global_bf16" and "index_bf16" hold the same rounded values as bfloat16, in the machine's byte order.
    `decode(encode(x))` is the fake quantiser of the same kind, to the bit. Encode what has not been rounded yet: a tiny
    "global" block (amax below 0.1) does not survive a second rounding, since its scale is a coarse e4m3 subnormal.
    """

    dim: int
    kind: RecordKind

    @property
    def code_bytes(self) -> int:
        if self.kind in _PACKED:
            return 2 * self.dim
        return self.dim if self.kind == "window" else self.dim // 2

    @property
    def scale_bytes(self) -> int:
        return 0 if self.kind in _PACKED else self.dim // _BLOCK_OF[self.kind]

    @property
    def nbytes(self) -> int:
        return self.code_bytes + self.scale_bytes

    def encode(self, x: Tensor) -> Tensor:
        """float [..., dim] -> uint8 [..., nbytes]."""
        if self.kind in _PACKED:
            packed = Record(self.dim, _PACKED[self.kind])
            return packed.decode(packed.encode(x)).view(torch.uint8)
        quantize = {"global": quantize_e2m1_e4m3, "index": quantize_e2m1_ue8m0, "window": quantize_e4m3}[self.kind]
        return torch.cat(quantize(x), -1)

    def decode(self, record: Tensor) -> Tensor:
        """uint8 [..., nbytes] -> bfloat16 [..., dim]."""
        if self.kind in _PACKED:
            return record.contiguous().view(torch.bfloat16)
        codes, scales = record[..., : self.code_bytes], record[..., self.code_bytes :]
        dequantize = {"global": dequantize_e2m1_e4m3, "index": dequantize_e2m1_ue8m0, "window": dequantize_e4m3}
        return dequantize[self.kind](codes, scales).to(torch.bfloat16)


def record_of(rows: Tensor, dim: int, kind: Literal["global", "index"]) -> Record:
    """The record that `rows` uint8 [S, bytes] hold, packed or bfloat16: their width tells which.

    Raises ValueError for a width that is neither.
    """
    packed, plain = Record(dim, kind), Record(dim, "global_bf16" if kind == "global" else "index_bf16")
    for record in (packed, plain):
        if rows.shape[-1] == record.nbytes:
            return record
    raise ValueError(
        f"a {kind} record of {dim} values takes {packed.nbytes} bytes, or {plain.nbytes} as bfloat16; "
        f"got rows of shape {list(rows.shape)}"
    )


@dataclass(frozen=True)
class E4m3Weight:
    """An fp8 weight as stored: codes uint8 [N, K], one ue8m0 scale byte per 32x32 tile [ceil(N/32), ceil(K/32)]."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Tensor:
        """float32 [N, K]; every value is also exact in bfloat16."""
        return dequantize_weight_e4m3(self.codes, self.scales)


@dataclass(frozen=True)
class E2m1Weight:
    """An fp4 weight as stored: packed uint8 [N, K/2], one ue8m0 scale byte per 32 inputs [N, K/32]."""

    packed: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def dequantize(self) -> Tensor:
        """float32 [N, K]; every value is also exact in bfloat16."""
        return dequantize_weight_e2m1(self.packed, self.scales)


# A bfloat16 tensor [N, K], or one of the stored forms. Only stored forms have their inputs rounded to e4m3.
Weight = Tensor | E4m3Weight | E2m1Weight
