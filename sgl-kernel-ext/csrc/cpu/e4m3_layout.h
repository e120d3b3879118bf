// How rows lie in memory for products with e4m3 weights, and why the sums are exact. Included by e4m3_*_loops.cpp
// alone.
//
// An input is an integer below 2^18 and a sign (its code times 2^9): unit * high + low, where unit is 2^4 to 2^7 and
// |low| <= unit / 2. A weight is such an integer too: 8 * coarse + fine, where `fine` is zero for magnitudes of 1/8 and
// more (exponent field 4 and up), and `coarse` for smaller ones. So a block's sum of products is
//
//     8 * unit * sum(high * coarse) + 8 * sum(low * coarse) + sum(input * fine).
//
// |coarse| is at most 28672, and the unit is such that sum(|high|) is at most 74000, which 2^7 always brings about. So
// the first sum stays below 2^31, the second too (32 * 64 * 28672), and both are exact in int32, in any order; the
// third has few terms. Where only the first is there, which is the common case, its conversion to float32 is the one
// rounding of the definition. Else the three are put together in float64, where all of it is exact (below 2^41). Scales
// are powers of two.
#pragma once

#include "simd.h"
#include "stored_loops.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

constexpr int kUnit = 18;                           // the sum above is 2^18 times that of the codes' values
constexpr int kSmallestUnit = 4, kLargestUnit = 7;  // of `high`, as powers of two
constexpr int32_t kLargestSum = 74000;              // of |high| over a block

// kLowestScales, kHighestScales: of input and weight together, what keeps a sum of whole products a normal float32.
constexpr int kLowestScales = 254 - 126 + kUnit;
constexpr int kHighestScales = 254 + 127 + (kUnit - 3 - kLargestUnit);
constexpr int kLargestFiniteScale = 246;  // 448 * 2^(247 - 127) is beyond float32, and no bfloat16

struct BlockInfo {
  int16_t scale;  // ue8m0 code
  int8_t unit;    // a power of two
  bool has_low;
};

// A packed row: header, `BlockInfo` per block, then all `high` and all `low` as int16; and for levels with byte dot
// products, which take a single row so, the same as three digits: high = 128 * first + second, and low.
struct PackedRow {
  const BlockInfo* blocks;
  const int16_t *high, *low;

  SGL_KERNEL_EXT_INLINE PackedRow(const uint8_t* row, int64_t k) {
    blocks = reinterpret_cast<const BlockInfo*>(row + 64);
    high = reinterpret_cast<const int16_t*>(row + high_offset(k / kBlock));
    low = high + k;
  }
  static SGL_KERNEL_EXT_INLINE int64_t high_offset(int64_t blocks) { return 64 + (blocks * 4 + 63) / 64 * 64; }
#if defined(__AVX512VBMI__)
  static constexpr int64_t kDigits = 3;
  static SGL_KERNEL_EXT_INLINE int64_t padded(int64_t k) { return (k + 63) / 64 * 64; }
  static SGL_KERNEL_EXT_INLINE const int8_t* digits(const uint8_t* row, int64_t k, int64_t digit) {
    return reinterpret_cast<const int8_t*>(row + high_offset(k / kBlock) + 4 * k + digit * padded(k));
  }
  static SGL_KERNEL_EXT_INLINE int64_t nbytes(int64_t k) {
    return (high_offset(k / kBlock) + 4 * k + kDigits * padded(k) + 63) / 64 * 64;
  }
#else
  static SGL_KERNEL_EXT_INLINE int64_t nbytes(int64_t k) { return high_offset(k / kBlock) + 4 * k; }
#endif
};

struct IntegerTable {
  int32_t value[256];
};

constexpr IntegerTable make_integers() {
  IntegerTable table{};
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    const int magnitude = exponent == 0 ? mantissa : (8 + mantissa) << (exponent - 1);
    table.value[code] = (code & 0x80) != 0 ? -magnitude : magnitude;
  }
  return table;
}
constexpr IntegerTable kE4m3Times512 = make_integers();

// What a block of weights holds below 1/8.
struct FineWeight {
  uint8_t column, input;
  int16_t value;
};

struct FineWeights {
  FineWeight at[kTile * kBlock];
  int count;
};

#if defined(__AVX2__)
// Where fine weights and NaNs are among a block's 32 codes, one bit each.
SGL_KERNEL_EXT_INLINE uint32_t unusual_places(const uint8_t* codes) {
  const __m256i block = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  // Twice a code, its sign lost, less two: a fine weight is at most 0x3c, and a NaN 0xfc.
  const __m256i less = _mm256_sub_epi8(_mm256_add_epi8(block, block), _mm256_set1_epi8(2));
  const __m256i fine = _mm256_cmpeq_epi8(_mm256_min_epu8(less, _mm256_set1_epi8(0x3c)), less);
  const __m256i nan = _mm256_cmpeq_epi8(less, _mm256_set1_epi8(-4));
  return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_or_si256(fine, nan)));
}
#else
inline uint32_t unusual_places(const uint8_t* codes) {
  uint32_t places = 0;
  for (int i = 0; i < kBlock; ++i) {
    const int magnitude = codes[i] & 0x7f;
    places |= static_cast<uint32_t>(magnitude == 0x7f || (magnitude != 0 && magnitude < 0x20)) << i;
  }
  return places;
}
#endif

// Adds the fine weights of some of a tile's columns, by one block, to the list; false if there is a NaN. codes: of the
// tile's first column.
inline bool find_fine(const uint8_t* codes, int64_t stride, int first, int count, FineWeights* out) {
  for (int column = first; column < first + count; ++column) {
    const uint8_t* block = codes + column * stride;
    for (uint32_t places = unusual_places(block); places != 0; places &= places - 1) {
      const int i = __builtin_ctz(places);
      if ((block[i] & 0x7f) == 0x7f) {
        return false;
      }
      out->at[out->count++] = {static_cast<uint8_t>(column), static_cast<uint8_t>(i),
                               static_cast<int16_t>(kE4m3Times512.value[block[i]])};
    }
  }
  return true;
}

// `total`, as it was before the block, plus a block's sum for the columns that have fine weights. high_sums, low_sums:
// of all columns; weight_scales: scale codes of the columns.
inline void add_fine(const FineWeights& fine, const int32_t* high_sums, const int32_t* low_sums, const int16_t* high,
                     const int16_t* low, BlockInfo info, const int32_t* weight_scales, const float* before,
                     float* total) {
  const int32_t unit = 1 << info.unit;
  for (int i = 0; i < fine.count;) {
    const int c = fine.at[i].column;
    int64_t sum = 8 * (static_cast<int64_t>(high_sums[c]) * unit + low_sums[c]);
    for (; i < fine.count && fine.at[i].column == c; ++i) {
      const int input = fine.at[i].input;
      sum += (high[input] * unit + low[input]) * fine.at[i].value;
    }
    const double scale = power_of_two(static_cast<int64_t>(info.scale) + weight_scales[c] - 254 - kUnit);
    total[c] = before[c] + static_cast<float>(static_cast<double>(sum) * scale);
  }
}

// Adds a block's first two sums of sixteen columns.
SGL_KERNEL_EXT_INLINE void add_both(const int32_t* high_sums, const int32_t* low_sums, BlockInfo info,
                                    const int32_t* weight_scales, float* total) {
  const double unit = static_cast<double>(1 << info.unit);
  int64_t scales[kTile];
  for (int c = 0; c < kTile; ++c)
    scales[c] = static_cast<int64_t>(weight_scales[c] + info.scale + 1023 - 254 - kUnit + 3);
  double factors[kTile];
  for (int c = 0; c < kTile; ++c) scales[c] <<= 52;
  __builtin_memcpy(factors, scales, sizeof(factors));
  for (int c = 0; c < kTile; ++c) total[c] += static_cast<float>((high_sums[c] * unit + low_sums[c]) * factors[c]);
}

}  // namespace

#if defined(__AVX2__)
// Sixteen columns by some rows and one block, added to total [num_rows][16]. codes: of the first column, at the block;
// weight_scales: of the columns. False, having done nothing, if a weight is a NaN.
bool multiply_panel(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const uint8_t* codes, int64_t k,
                    int64_t block, const int32_t* weight_scales, float* total);
#endif

#if defined(__AVX512VBMI__)
// Sixteen columns by one row -> total. scales: of the columns before the border, and of the others. False if a weight
// is a NaN.
bool multiply_row(const uint8_t* packed, const uint8_t* codes, int64_t k, const uint8_t* next,
                  const uint8_t* const* scales, int32_t border, float* total);
#endif

}  // namespace sgl_kernel_ext::CPU_LEVEL
