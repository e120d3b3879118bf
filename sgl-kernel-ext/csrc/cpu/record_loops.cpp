// Compiled once per CPU level; see e4m3_block_loops.cpp for what that forbids.

#include "record_loops.h"

#include "simd_record.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

constexpr int32_t kInfinity = 0x7f800000;

// Magnitudes as float32 bits, which compare as integers do; a NaN becomes 0.
SGL_KERNEL_EXT_INLINE int32_t magnitude_bits(uint16_t x) {
  const int32_t bits = (x & 0x7fff) << 16;
  return bits > kInfinity ? 0 : bits;
}

template <int kCount>
SGL_KERNEL_EXT_INLINE float largest(const uint16_t* x) {
  int32_t top = 0;
  for (int i = 0; i < kCount; ++i) {
    const int32_t bits = magnitude_bits(x[i]);
    top = bits > top ? bits : top;
  }
  return as_float(top);
}

// magnitude / scale rounded to e2m1, nearest, ties to even, saturating.
SGL_KERNEL_EXT_INLINE int32_t e2m1_code(float a) {
  return (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
}

template <int kCount>
SGL_KERNEL_EXT_INLINE void e2m1_codes(const uint16_t* x, float scale, int32_t* codes) {
  for (int i = 0; i < kCount; ++i) {
    codes[i] = e2m1_code(as_float(magnitude_bits(x[i])) / scale) | ((x[i] >> 12) & 8);
  }
}

template <int kCount>
SGL_KERNEL_EXT_INLINE void encode_block(const uint16_t* x, float scale, uint8_t* packed) {
  int32_t codes[kCount];
  e2m1_codes<kCount>(x, scale, codes);
  for (int i = 0; i < kCount / 2; ++i) packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
}

// e4m3(min(max(largest, 6 * 2^-9) / 6, 448)), nearest even: adding 2^(e + 20) to a value with exponent e rounds it
// there.
SGL_KERNEL_EXT_INLINE uint8_t e4m3_scale(float top) {
  const float bound = top < 6.0f * 0x1p-9f ? 6.0f * 0x1p-9f : top;
  const float quotient = bound / 6.0f > 448.0f ? 448.0f : bound / 6.0f;
  const int32_t exponent = static_cast<int32_t>(as_bits(quotient) & 0x7f800000u), lowest = (127 - 6) << 23;
  const int32_t held = exponent > lowest ? exponent : lowest;
  const float shift = as_float(held + (20 << 23));
  const int32_t steps = static_cast<int32_t>(as_bits(quotient + shift) - as_bits(shift));
  return static_cast<uint8_t>(steps + 8 * ((held - lowest) >> 23));
}

// 2^ceil(log2(max(largest, 6 * 2^-126) / 6)) as a ue8m0 code.
SGL_KERNEL_EXT_INLINE uint8_t ue8m0_scale(float top) {
  const float bound = (top < 6.0f * 0x1p-126f ? 6.0f * 0x1p-126f : top) / 6.0f;
  const uint32_t bits = as_bits(bound);
  const uint32_t code = (bits >> 23) + ((bits & 0x7fffffu) != 0 ? 1 : 0);
  return static_cast<uint8_t>(code > 254 ? 254 : code);
}

SGL_KERNEL_EXT_INLINE float ue8m0_value(uint8_t code) {
  return code == 255 ? __builtin_nanf("") : code == 0 ? 0x1p-127f : as_float(static_cast<int32_t>(code) << 23);
}

constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                             -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

SGL_KERNEL_EXT_INLINE void decode_block(const uint8_t* packed, int count, float scale, uint16_t* out) {
  for (int i = 0; i < count / 2; ++i) {
    out[2 * i] = to_bfloat16(kE2m1[packed[i] & 15] * scale);
    out[2 * i + 1] = to_bfloat16(kE2m1[packed[i] >> 4] * scale);
  }
}

}  // namespace

void encode_global(const uint16_t* x, int64_t dim, uint8_t* record) {
  for (int64_t i = 0; i < dim / 16; ++i) {
    const uint8_t scale = e4m3_scale(largest<16>(x + 16 * i));
    record[dim / 2 + i] = scale;
    encode_block<16>(x + 16 * i, static_cast<float>(e4m3_value(scale)), record + 8 * i);
  }
}

void encode_index(const uint16_t* x, int64_t dim, uint8_t* record) {
  for (int64_t i = 0; i < dim / 32; ++i) {
    const uint8_t scale = ue8m0_scale(largest<32>(x + 32 * i));
    record[dim / 2 + i] = scale;
    encode_block<32>(x + 32 * i, ue8m0_value(scale), record + 16 * i);
  }
}

void decode_global(const uint8_t* record, int64_t dim, uint16_t* out) {
  for (int64_t i = 0; i < dim / 16; ++i) {
    decode_block(record + 8 * i, 16, static_cast<float>(e4m3_value(record[dim / 2 + i])), out + 16 * i);
  }
}

void decode_index(const uint8_t* record, int64_t dim, uint16_t* out) {
  for (int64_t i = 0; i < dim / 32; ++i) {
    decode_block(record + 16 * i, 32, ue8m0_value(record[dim / 2 + i]), out + 32 * i);
  }
}

void round_index(const uint16_t* x, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; i += 32) {
    const float scale = ue8m0_value(ue8m0_scale(largest<32>(x + i)));
    int32_t codes[32];
    e2m1_codes<32>(x + i, scale, codes);
    for (int j = 0; j < 32; ++j) out[i + j] = to_bfloat16(kE2m1[codes[j]] * scale);
  }
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
