// Coarse parts of e4m3 weights as int16, in vectors of the level. Included by e4m3_*_loops.cpp alone; see
// e4m3_layout.h.
#pragma once

#include "e4m3_layout.h"
#include "simd_bytes.h"

#if defined(__AVX2__)

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

// Within each 128-bit lane: the first eight codes and the last eight.
struct Coarse {
  Bytes first, second;
};

// A code is sign, four bits of exponent, three of mantissa. coarse = ((8 + mantissa) << (exponent & 1)) * 4^(exponent /
// 2 - 2): one factor from each nibble, the second zero where the weight is fine.
SGL_KERNEL_EXT_INLINE Coarse coarse_weights(Bytes codes) {
  const Bytes low_bits = V(set1_epi8)(15), zero = Bytes{};
  const Bytes factor = in_all_lanes(_mm_setr_epi8(8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 30));
  const Bytes power_low = in_all_lanes(_mm_setr_epi8(0, 0, 1, 4, 16, 64, 0, 0, 0, 0, -1, -4, -16, -64, 0, 0));
  const Bytes power_high = in_all_lanes(_mm_setr_epi8(0, 0, 0, 0, 0, 0, 1, 4, 0, 0, -1, -1, -1, -1, -1, -4));
  const Bytes high_nibbles = VB (and)(V(srli_epi16)(codes, 4), low_bits);
  const Bytes factors = V(shuffle_epi8)(factor, VB (and)(codes, low_bits));
  const Bytes low = V(shuffle_epi8)(power_low, high_nibbles), high = V(shuffle_epi8)(power_high, high_nibbles);
  return {V(mullo_epi16)(V(unpacklo_epi8)(factors, zero), V(unpacklo_epi8)(low, high)),
          V(mullo_epi16)(V(unpackhi_epi8)(factors, zero), V(unpackhi_epi8)(low, high))};
}

// Magnitudes times two, plus two: below 0x42 for what is no coarse weight (0 for a NaN, 2 for a zero).
SGL_KERNEL_EXT_INLINE Bytes magnitude_class(Bytes codes) {
  return V(add_epi8)(V(add_epi8)(codes, codes), V(set1_epi8)(2));
}

SGL_KERNEL_EXT_INLINE bool any_below_coarse(Bytes least) {
#if defined(__AVX512BW__)
  return _mm512_cmplt_epu8_mask(least, _mm512_set1_epi8(0x42)) != 0;
#else
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(least, _mm256_set1_epi8(0x42)), least)) != -1;
#endif
}

// Adds products of neighbours to the sums.
SGL_KERNEL_EXT_INLINE Bytes add_pairs(Bytes sums, Bytes a, Bytes b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sums, a, b);
#else
  return V(add_epi32)(sums, V(madd_epi16)(a, b));
#endif
}

constexpr int kVectors = kTile * 4 / static_cast<int>(sizeof(Bytes));  // of one number per column

SGL_KERNEL_EXT_INLINE void add_scaled(const Bytes* sums, const int32_t* weight_scales, BlockInfo info, float* total) {
  const Bytes exponent = V(set1_epi32)(info.scale + info.unit + 3 - 127 - kUnit);
  for (int v = 0; v < kVectors; ++v, total += kTile / kVectors, weight_scales += kTile / kVectors) {
    Singles before;
    __builtin_memcpy(&before, total, sizeof(before));
    const Singles after = before + times_power(sums[v], V(add_epi32)(load_bytes(weight_scales), exponent));
    __builtin_memcpy(total, &after, sizeof(after));
  }
}

// Adds what a block makes of sums[0] (high digits) and sums[1] (low digits) of sixteen columns.
SGL_KERNEL_EXT_INLINE void finish_block(const Bytes (*sums)[kVectors], const FineWeights& fine, const int16_t* high,
                                        const int16_t* low, BlockInfo info, const int32_t* weight_scales,
                                        float* total) {
  if (!info.has_low && fine.count == 0) {
    add_scaled(sums[0], weight_scales, info, total);
    return;
  }
  alignas(64) int32_t parts[2][kTile];
  float before[kTile];
  __builtin_memcpy(parts, sums, sizeof(parts));
  __builtin_memcpy(before, total, sizeof(before));
  if (info.has_low) {
    add_both(parts[0], parts[1], info, weight_scales, total);
  } else {
    add_scaled(sums[0], weight_scales, info, total);
  }
  if (fine.count != 0) {
    add_fine(fine, parts[0], parts[1], high, low, info, weight_scales, before, total);
  }
}

}  // namespace
}  // namespace sgl_kernel_ext::CPU_LEVEL

#endif
