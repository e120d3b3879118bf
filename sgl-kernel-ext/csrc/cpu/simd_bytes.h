// Bytes and small integers in vectors of the level, where it has any. Included by *_loops.cpp alone.
#pragma once

#include "simd.h"

#if defined(__AVX2__)

// The few instructions that the two vector levels spell differently.
#if defined(__AVX512BW__)
#define V(name) _mm512_##name
#define VB(name) _mm512_##name##_si512
#else
#define V(name) _mm256_##name
#define VB(name) _mm256_##name##_si256
#endif

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

#if defined(__AVX512BW__)
typedef __m512i Bytes;
typedef __m512 Singles;
SGL_KERNEL_EXT_INLINE Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
SGL_KERNEL_EXT_INLINE void store_bytes(void* p, Bytes v) { _mm512_storeu_si512(p, v); }
SGL_KERNEL_EXT_INLINE Bytes in_all_lanes(__m128i v) { return _mm512_broadcast_i32x4(v); }
SGL_KERNEL_EXT_INLINE Bytes all_of_eight_bytes(int64_t v) { return _mm512_set1_epi64(v); }
SGL_KERNEL_EXT_INLINE Singles times_power(Bytes value, Bytes exponent_field) {
  return _mm512_cvtepi32_ps(value) * _mm512_castsi512_ps(_mm512_slli_epi32(exponent_field, 23));
}
#else
typedef __m256i Bytes;
typedef __m256 Singles;
SGL_KERNEL_EXT_INLINE Bytes load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
SGL_KERNEL_EXT_INLINE void store_bytes(void* p, Bytes v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
SGL_KERNEL_EXT_INLINE Bytes in_all_lanes(__m128i v) { return _mm256_broadcastsi128_si256(v); }
SGL_KERNEL_EXT_INLINE Bytes all_of_eight_bytes(int64_t v) { return _mm256_set1_epi64x(v); }
SGL_KERNEL_EXT_INLINE Singles times_power(Bytes value, Bytes exponent_field) {
  return _mm256_cvtepi32_ps(value) * _mm256_castsi256_ps(_mm256_slli_epi32(exponent_field, 23));
}
#endif

// Sixteen bytes of each of sixteen rows -> out[s][row]: bytes 4s .. 4s + 3 of every row side by side.
SGL_KERNEL_EXT_INLINE void turn_rows(const uint8_t* rows, int64_t stride, uint8_t (*out)[64]) {
  for (int r = 0; r < 16; r += 4) {
    const auto row = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + (r + i) * stride)); };
    const __m128i a = _mm_unpacklo_epi32(row(0), row(1)), b = _mm_unpacklo_epi32(row(2), row(3));
    const __m128i c = _mm_unpackhi_epi32(row(0), row(1)), d = _mm_unpackhi_epi32(row(2), row(3));
    const __m128i steps[4] = {_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b), _mm_unpacklo_epi64(c, d),
                              _mm_unpackhi_epi64(c, d)};
    for (int s = 0; s < 4; ++s) _mm_storeu_si128(reinterpret_cast<__m128i*>(out[s] + 4 * r), steps[s]);
  }
}

// The sums of the four 32-bit parts of each 128-bit lane, of four vectors side by side.
SGL_KERNEL_EXT_INLINE Bytes sum_of_four(const Bytes* x) {
  const Bytes a = V(add_epi32)(V(unpacklo_epi32)(x[0], x[1]), V(unpackhi_epi32)(x[0], x[1]));
  const Bytes b = V(add_epi32)(V(unpacklo_epi32)(x[2], x[3]), V(unpackhi_epi32)(x[2], x[3]));
  return V(add_epi32)(V(unpacklo_epi64)(a, b), V(unpackhi_epi64)(a, b));
}

#if defined(__AVX512VNNI__)
SGL_KERNEL_EXT_INLINE Bytes four_bytes(const uint8_t* p) {
  int32_t bytes;
  __builtin_memcpy(&bytes, p, 4);
  return _mm512_set1_epi32(bytes);
}

// Adds to each sum the dot product of four unsigned and four signed bytes.
SGL_KERNEL_EXT_INLINE Bytes add_dots(Bytes sums, Bytes unsigned_bytes, Bytes signed_bytes) {
  return _mm512_dpbusd_epi32(sums, unsigned_bytes, signed_bytes);
}
#endif

// Packed e2m1 codes as twice their value plus 12, low nibbles and high nibbles.
struct EvenOdd {
  Bytes even, odd;
};

SGL_KERNEL_EXT_INLINE EvenOdd unpack(Bytes packed) {
  const Bytes table = in_all_lanes(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
#if defined(__AVX512VBMI__)  // looks at six bits, of which the upper two choose among four equal parts
  return {_mm512_permutexvar_epi8(packed, table), _mm512_permutexvar_epi8(_mm512_srli_epi16(packed, 4), table)};
#else
  const Bytes low = V(set1_epi8)(15);
  return {V(shuffle_epi8)(table, VB (and)(packed, low)),
          V(shuffle_epi8)(table, VB (and)(V(srli_epi16)(packed, 4), low))};
#endif
}

}  // namespace
}  // namespace sgl_kernel_ext::CPU_LEVEL

#endif
