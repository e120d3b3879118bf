// Products with packed e2m1 weights for few rows: weights are used as they come. Compiled once per CPU level; see
// e4m3_block_loops.cpp for what that forbids, and e2m1_layout.h for why the sums are exact.

#include "e2m1_layout.h"
#include "simd_bytes.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

struct Range {
  int32_t lowest, highest;
};

Range scale_range(const uint8_t* scales, int64_t count) {
  uint8_t lowest = 255, highest = 0;
  for (int64_t i = 0; i < count; ++i) {
    lowest = scales[i] < lowest ? scales[i] : lowest;
    highest = scales[i] > highest ? scales[i] : highest;
  }
  return {lowest, highest};
}

#if defined(__AVX2__)

#if defined(__AVX512BW__)
// Value i of four to all of lane i.
SGL_KERNEL_EXT_INLINE Bytes per_lane(const int32_t* p) {
  const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutexvar_epi32(lane, _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// Scale codes of four columns by four blocks -> lane = block, element = column.
SGL_KERNEL_EXT_INLINE Bytes scale_codes(const uint8_t* p, int64_t stride) {
  int32_t row[4];
  for (int i = 0; i < 4; ++i) __builtin_memcpy(&row[i], p + i * stride, 4);
  const __m128i by_column = _mm_setr_epi32(row[0], row[1], row[2], row[3]);
  const __m128i turn = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_cvtepu8_epi32(_mm_shuffle_epi8(by_column, turn));
}
// Adds lane 0 of the four vectors, as 16 columns, then lane 1, 2, 3.
SGL_KERNEL_EXT_INLINE void add_in_order(float* total, const Singles* x) {
  const __m512 a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
  const __m512 c = _mm512_shuffle_f32x4(x[2], x[3], 0x44), d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
  __m512 sum = _mm512_loadu_ps(total) + _mm512_shuffle_f32x4(a, c, 0x88);
  sum = sum + _mm512_shuffle_f32x4(a, c, 0xdd);
  sum = sum + _mm512_shuffle_f32x4(b, d, 0x88);
  _mm512_storeu_ps(total, sum + _mm512_shuffle_f32x4(b, d, 0xdd));
}
#else
SGL_KERNEL_EXT_INLINE Bytes per_lane(const int32_t* p) {
  const __m128i two = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(two), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
}
SGL_KERNEL_EXT_INLINE Bytes scale_codes(const uint8_t* p, int64_t stride) {
  int16_t row[4];
  for (int i = 0; i < 4; ++i) __builtin_memcpy(&row[i], p + i * stride, 2);
  const __m128i by_column = _mm_setr_epi16(row[0], row[1], row[2], row[3], 0, 0, 0, 0);
  const __m128i turn = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, -1, -1, -1, -1, -1, -1, -1, -1);
  return _mm256_cvtepu8_epi32(_mm_shuffle_epi8(by_column, turn));
}
SGL_KERNEL_EXT_INLINE void add_in_order(float* total, const Singles* x) {
  for (int half = 0; half < 2; ++half, total += 8, x += 2) {
    const __m256 sum = _mm256_loadu_ps(total) + _mm256_permute2f128_ps(x[0], x[1], 0x20);
    _mm256_storeu_ps(total, sum + _mm256_permute2f128_ps(x[0], x[1], 0x31));
  }
}
#endif

// One column by one group: one digit of the inputs, added to four partial sums per lane.
#if defined(__AVX512VNNI__)
SGL_KERNEL_EXT_INLINE Bytes add_digit(Bytes sums, const EvenOdd& weights, const uint8_t* digits) {
  return add_dots(add_dots(sums, weights.even, load_bytes(digits)), weights.odd, load_bytes(digits + kGroupBytes));
}
#else
SGL_KERNEL_EXT_INLINE Bytes add_digit(Bytes sums, const EvenOdd& weights, const uint8_t* digits) {
  const Bytes pairs = V(add_epi16)(V(maddubs_epi16)(weights.even, load_bytes(digits)),
                                   V(maddubs_epi16)(weights.odd, load_bytes(digits + kGroupBytes)));
  return V(add_epi32)(sums, V(madd_epi16)(pairs, V(set1_epi16)(1)));
}
#endif

template <bool kFine>
SGL_KERNEL_EXT_INLINE Bytes partial_sums(const EvenOdd& weights, const uint8_t* digits) {
  const Bytes high = V(slli_epi32)(add_digit(Bytes{}, weights, digits), 8);
  const Bytes coarse = V(slli_epi32)(add_digit(high, weights, digits + kDigitBytes), 3);
  return kFine ? add_digit(coarse, weights, digits + 2 * kDigitBytes) : coarse;
}

template <bool kFine, typename Weights>
SGL_KERNEL_EXT_INLINE void add_group(const uint8_t* row, const Bytes* scales, float* total, const Weights& weights) {
  const GroupTail* tail = reinterpret_cast<const GroupTail*>(row + kDigits * kDigitBytes);
  const Bytes sums = per_lane(tail->sums), exponents = per_lane(tail->exponents);
  Singles blocks[4];
  for (int quad = 0; quad < 4; ++quad) {
    Bytes column[4];
    for (int c = 0; c < 4; ++c) column[c] = partial_sums<kFine>(weights(4 * quad + c), row);
    blocks[quad] = times_power(V(sub_epi32)(sum_of_four(column), sums), V(add_epi32)(scales[quad], exponents));
  }
  add_in_order(total, blocks);
}

template <typename Weights>
SGL_KERNEL_EXT_INLINE void add_group(const uint8_t* row, const Bytes* scales, float* total, const Weights& weights) {
  const GroupTail* tail = reinterpret_cast<const GroupTail*>(row + kDigits * kDigitBytes);
  if (tail->has_fine != 0) {
    add_group<true>(row, scales, total, weights);
  } else {
    add_group<false>(row, scales, total, weights);
  }
}

void multiply_group(const uint8_t* packed, int64_t row_bytes, const int32_t* rows, int64_t num_rows,
                    const GroupWeights& group, float* total) {
  Bytes scales[4];
  for (int quad = 0; quad < 4; ++quad) {
    scales[quad] = scale_codes(group.scales + 4 * quad * group.scales_stride, group.scales_stride);
  }
  if (num_rows == 1) {
    add_group(packed + rows[0] * row_bytes, scales, total, [&](int c) __attribute__((always_inline)) {
      __builtin_prefetch(group.next + c * kGroupBytes);
      return unpack(load_bytes(group.codes + c * group.codes_stride));
    });
    return;
  }
  EvenOdd unpacked[kTile];
  for (int c = 0; c < kTile; ++c) unpacked[c] = unpack(load_bytes(group.codes + c * group.codes_stride));
  for (int64_t r = 0; r < num_rows; ++r) {
    add_group(packed + rows[r] * row_bytes, scales, total + r * kTile,
              [&](int c) __attribute__((always_inline)) { return unpacked[c]; });
  }
}

void multiply(const uint8_t* packed, int64_t row_bytes, const int32_t* rows, int64_t num_rows,
              const GroupWeights& group, float* total) {
#if defined(__AVX512VNNI__)
  constexpr int64_t kFewestForPanel = 4;  // so many rows pay for one
  if (num_rows >= kFewestForPanel) {
    multiply_panel(packed, row_bytes, rows, num_rows, group, total);
    return;
  }
#endif
  multiply_group(packed, row_bytes, rows, num_rows, group, total);
}

#else

constexpr uint8_t kE2m1Twice[8] = {0, 1, 2, 3, 4, 6, 8, 12};

void multiply(const uint8_t* packed, int64_t row_bytes, const int32_t* rows, int64_t num_rows,
              const GroupWeights& group, float* total) {
  for (int c = 0; c < kTile; ++c) {
    int16_t even[kBlockBytes], odd[kBlockBytes];
    for (int i = 0; i < kBlockBytes; ++i) {
      const uint8_t byte = group.codes[c * group.codes_stride + i];
      even[i] = static_cast<int16_t>((byte & 8) != 0 ? -kE2m1Twice[byte & 7] : kE2m1Twice[byte & 7]);
      odd[i] = static_cast<int16_t>((byte & 0x80) != 0 ? -kE2m1Twice[byte >> 4 & 7] : kE2m1Twice[byte >> 4 & 7]);
    }
    for (int64_t r = 0; r < num_rows; ++r) {
      const uint8_t* row = packed + rows[r] * row_bytes;
      const int8_t* digits = reinterpret_cast<const int8_t*>(row);
      const GroupTail* tail = reinterpret_cast<const GroupTail*>(row + kDigits * kDigitBytes);
      int32_t sums[kDigits] = {0, 0, 0};
      for (int d = 0; d < kDigits; ++d, digits += kDigitBytes) {
        for (int i = 0; i < kBlockBytes; ++i) sums[d] += even[i] * digits[i] + odd[i] * digits[kBlockBytes + i];
      }
      const int32_t sum = 8 * (256 * sums[0] + sums[1]) + sums[2];
      const int32_t exponent = tail->exponents[0] + group.scales[c * group.scales_stride];
      total[r * kTile + c] += static_cast<float>(sum) * as_float(exponent << 23);
    }
  }
}

#endif

}  // namespace

void tile_e2m1(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const StoredWeight& weight, int64_t column,
               const uint8_t* next, float* total, bool* careful) {
  const int64_t blocks = weight.k / kBlock, groups = groups_of(weight.k), row_bytes = packed_row_bytes_e2m1(weight.k);
  const uint8_t* codes = weight.codes + column * weight.k / 2;
  const uint8_t* scales = weight.scales + column * blocks;
  const Range range = scale_range(scales, kTile * blocks);
  for (int64_t r = 0; r < num_rows; ++r) {
    PackedRowHeader header;
    __builtin_memcpy(&header, packed + rows[r] * row_bytes, sizeof(header));
    careful[r] = header.careful || range.highest > 252 || header.lowest_scale + range.lowest < kLowestScales ||
                 header.highest_scale + range.highest > kHighestScales;
    for (int64_t c = 0; c < kTile; ++c) total[r * kTile + c] = 0.0f;
  }
  for (int64_t g = 0; g < groups; ++g) {
    GroupWeights group{codes + g * kGroupBytes, weight.k / 2, scales + g * kGroup, blocks,
                       next + g * kTile * kGroupBytes};
    uint8_t last_codes[kTile * kGroupBytes], last_scales[kTile * kGroup];
    const int64_t left = blocks - g * kGroup;
    if (left < kGroup) {
      for (int64_t c = 0; c < kTile; ++c) {
        __builtin_memset(last_codes + c * kGroupBytes, 0, kGroupBytes);
        __builtin_memset(last_scales + c * kGroup, 127, kGroup);
        __builtin_memcpy(last_codes + c * kGroupBytes, group.codes + c * group.codes_stride,
                         static_cast<uint64_t>(left * kBlockBytes));
        __builtin_memcpy(last_scales + c * kGroup, group.scales + c * blocks, static_cast<uint64_t>(left));
      }
      group = {last_codes, kGroupBytes, last_scales, kGroup, group.next};
    }
    multiply(packed + 64 + g * kGroupRow, row_bytes, rows, num_rows, group, total);
  }
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
