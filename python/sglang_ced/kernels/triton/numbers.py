"""Number formats in registers: decode and round e4m3, ue8m0 and e2m1 with integer arithmetic, on any GPU from sm_80.

The counterparts of `sglang_ced.formats`, to the bit. Decoded values and scaled values are exact in bfloat16, so tensor
cores take them as bfloat16.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Kernels whose roundings are those of the reference: a product and a sum are not fused into one rounding.
UNFUSED = {"enable_fp_fusion": False}


# -- what Triton's interpreter does otherwise than a GPU: it cuts instead of rounding to bfloat16, reads subnormal
#    bfloat16 wrongly, and multiplies the bit patterns of bfloat16 in `tl.dot`


@triton.jit
def narrow(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """float32 to bfloat16 or float32, to nearest, ties to even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True).to(tl.int64)
        bits = tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def widen(x: tl.tensor) -> tl.tensor:
    """bfloat16 or float32 to float32."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + a b, in float32; float32 operands are not cut to tf32."""
    if INTERPRETED:
        a, b = widen(a), widen(b)
    return tl.dot(a, b, total, input_precision="ieee")


# -- decode -----------------------------------------------------------------------------------------------------------


@triton.jit
def ue8m0_value(code: tl.tensor) -> tl.tensor:
    """Byte -> float32 power of two; 0 is the subnormal 2^-127, 255 is NaN."""
    wide = code.to(tl.int32)
    bits = tl.where(wide == 0, 1 << 22, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_value(code: tl.tensor) -> tl.tensor:
    """Byte -> float32."""
    wide = code.to(tl.int32)
    size = wide & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)  # subnormals: steps of 2^-9
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(size == 0x7F, 0x7FC00000, bits)
    return (bits | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_value(code: tl.tensor) -> tl.tensor:
    """Low four bits -> float32; the bits above are ignored."""
    wide = code.to(tl.int32)
    size = wide & 7
    bits = tl.where(size < 2, size * 0x3F000000, (size << 22) + (126 << 23))  # 0 and 0.5, else a normal
    return (bits | ((wide & 8) << 28)).to(tl.float32, bitcast=True)


# -- round ------------------------------------------------------------------------------------------------------------


@triton.jit
def power_of_two(exponent: tl.tensor) -> tl.tensor:
    """int32 in -126..127 -> float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def ceil_exponent(amax: tl.tensor, LOG: tl.constexpr, FRACTION: tl.constexpr) -> tl.tensor:
    """ceil(log2(amax / largest)) for largest = 2^LOG * (1 + FRACTION / 2^23) and normal float32 amax, as int32.

    Equal to rounding the quotient to float32 first, as the definition does, for 448 and 6.
    """
    bits = amax.to(tl.int32, bitcast=True)
    return (bits >> 23) - (127 + LOG) + ((bits & 0x7FFFFF) > FRACTION).to(tl.int32)


@triton.jit
def e4m3_exponent(amax: tl.tensor) -> tl.tensor:
    """Exponent of an activation block's scale, for finite amax."""
    return ceil_exponent(tl.maximum(amax, 1e-4), 8, 0x600000)


@triton.jit
def e2m1_exponent(amax: tl.tensor) -> tl.tensor:
    """Exponent of an index block's scale, for finite amax."""
    return ceil_exponent(tl.maximum(amax, 7.052966104933725e-38), 2, 0x400000)  # the floor is 6 * 2^-126


@triton.jit
def round_e4m3(x: tl.tensor) -> tl.tensor:
    """float32 to the nearest e4m3 value, ties to even, saturating at +-448, as float32; NaN stays."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) & 0x7FF00000).to(tl.float32, bitcast=True)
    near_zero = (tl.abs(x) + 16384.0) - 16384.0  # float32 has steps of 2^-9 there, as e4m3 has below 2^-6
    value = tl.where(size < (121 << 23), near_zero, normal)
    signed = value.to(tl.int32, bitcast=True) | (bits & -0x80000000)
    return tl.where(x != x, bits, signed).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code(x: tl.tensor) -> tl.tensor:
    """An e4m3 value as float32 (see `round_e4m3`) -> its byte, as int32."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    code = tl.where(size < (121 << 23), (tl.abs(x) * 512.0).to(tl.int32), (size >> 20) - (120 << 3))
    return tl.where(x != x, 0x7F, code) | ((bits >> 24) & 0x80)


@triton.jit
def e2m1_code(x: tl.tensor) -> tl.tensor:
    """float32 -> nearest e2m1 code, ties to the even mantissa, saturating at 6, as int32; NaN gives a zero."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def largest(x: tl.tensor) -> tl.tensor:
    """Largest finite magnitude of the last dimension, kept; NaN does not count, an infinity counts as the largest
    finite bfloat16."""
    size = tl.where(x == x, tl.minimum(tl.abs(x), 3.3895313892515355e38), 0.0)
    return tl.max(size, axis=len(x.shape) - 1, keep_dims=True)


@triton.jit
def fake_e4m3(x: tl.tensor) -> tl.tensor:
    """float32 [..., 32] rounded to e4m3 under one ue8m0 scale, and back."""
    exponent = e4m3_exponent(largest(x))
    return round_e4m3(x * power_of_two(-exponent)) * power_of_two(exponent)


@triton.jit
def fake_e2m1(x: tl.tensor) -> tl.tensor:
    """float32 [..., 32] rounded to e2m1 under one ue8m0 scale, and back; NaN gives a zero."""
    exponent = e2m1_exponent(largest(x))
    return e2m1_value(e2m1_code(x * power_of_two(-exponent))) * power_of_two(exponent)


# -- orders -----------------------------------------------------------------------------------------------------------


@triton.jit
def ascending_key(x: tl.tensor) -> tl.tensor:
    """float32 -> int32 in the same order; both zeros are one, NaN comes last."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, key)
