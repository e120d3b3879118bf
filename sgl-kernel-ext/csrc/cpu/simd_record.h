// Values of packed cache records as doubles. Included by *_loops.cpp alone.
#pragma once

#include "simd.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

constexpr double kE2m1Halves[16] = {0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12};

// Sixteen e2m1 codes (even index in the low nibble) -> out[16] = value * 2 * half_scale. All products are exact.
SGL_KERNEL_EXT_INLINE void decode16_e2m1(const uint8_t* codes, double half_scale, double* out) {
#if defined(__AVX2__)
  const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)), low = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(packed, low), odd = _mm_and_si128(_mm_srli_epi16(packed, 4), low);
  const __m128i value = _mm_shuffle_epi8(table, _mm_unpacklo_epi8(even, odd));
  const Doubles scale = all(half_scale);
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtepi8_epi32(value);
  store(out, _mm512_cvtepi32_pd(_mm512_castsi512_si256(wide)) * scale);
  store(out + 8, _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(wide, 1)) * scale);
#else
  store(out, _mm256_cvtepi32_pd(_mm_cvtepi8_epi32(value)) * scale);
  store(out + 4, _mm256_cvtepi32_pd(_mm_cvtepi8_epi32(_mm_srli_si128(value, 4))) * scale);
  store(out + 8, _mm256_cvtepi32_pd(_mm_cvtepi8_epi32(_mm_srli_si128(value, 8))) * scale);
  store(out + 12, _mm256_cvtepi32_pd(_mm_cvtepi8_epi32(_mm_srli_si128(value, 12))) * scale);
#endif
#else
  for (int i = 0; i < 8; ++i) {
    out[2 * i] = kE2m1Halves[codes[i] & 15] * half_scale;
    out[2 * i + 1] = kE2m1Halves[codes[i] >> 4] * half_scale;
  }
#endif
}

SGL_KERNEL_EXT_INLINE double e4m3_value(uint8_t code) {
  const double magnitude =
      (code & 0x7f) == 0x7f ? __builtin_nan("") : static_cast<double>(as_float((code & 0x7f) << 20) * 0x1p+120f);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// A record of global KV: dim / 2 bytes of codes, then one e4m3 scale per 16 values.
SGL_KERNEL_EXT_INLINE void decode_global_record(const uint8_t* record, int64_t dim, double* out) {
  const uint8_t* scales = record + dim / 2;
  for (int64_t i = 0; i < dim / 16; ++i) decode16_e2m1(record + 8 * i, 0.5 * e4m3_value(scales[i]), out + 16 * i);
}

// A record of an index key: dim / 2 bytes of codes, then one ue8m0 scale per 32 values.
SGL_KERNEL_EXT_INLINE void decode_index_record(const uint8_t* record, int64_t dim, double* out) {
  const uint8_t* scales = record + dim / 2;
  for (int64_t i = 0; i < dim / 16; ++i) {
    const uint8_t code = scales[i / 2];
    decode16_e2m1(record + 8 * i, code == 255 ? __builtin_nan("") : power_of_two(code - 128), out + 16 * i);
  }
}

}  // namespace
}  // namespace sgl_kernel_ext::CPU_LEVEL
