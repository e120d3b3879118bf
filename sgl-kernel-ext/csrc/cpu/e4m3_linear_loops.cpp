// Products with e4m3 weights: one row takes the weights as they come, more rows a panel. Compiled once per CPU level;
// see e4m3_block_loops.cpp for what that forbids, and e4m3_layout.h for why the sums are exact.

#include "e4m3_decode.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

#if defined(__AVX512VBMI__)

bool multiply(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const uint8_t* codes, int64_t k,
              int64_t block, const int32_t* weight_scales, float* total) {
  return multiply_panel(packed, rows, num_rows, codes, k, block, weight_scales, total);
}

#elif defined(__AVX2__)

// -- one row ----------------------------------------------------------------------------------------------------------

// Inputs in the order in which `coarse_weights` gives the weights of one column.
struct Digits {
  Bytes first, second;
};

SGL_KERNEL_EXT_INLINE Digits load_digits(const int16_t* p) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  return {_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31)};
}

constexpr int kQuads = 4;
SGL_KERNEL_EXT_INLINE Bytes load_columns(const uint8_t* codes, int64_t stride, int quad, int i) {
  const uint8_t* p = codes + (4 * quad + i) * stride;
  __builtin_prefetch(p + kTile * stride);
  return load_bytes(p);
}
SGL_KERNEL_EXT_INLINE void join_quads(const Bytes* quads, Bytes* columns) {
  for (int i = 0; i < 2; ++i) {
    columns[i] = _mm256_add_epi32(_mm256_permute2x128_si256(quads[2 * i], quads[2 * i + 1], 0x20),
                                  _mm256_permute2x128_si256(quads[2 * i], quads[2 * i + 1], 0x31));
  }
}

// Returns which quads of vectors have weights that are not coarse, one bit each.
template <bool kHasLow>
SGL_KERNEL_EXT_INLINE uint32_t digit_sums(const uint8_t* codes, int64_t stride, const int16_t* high, const int16_t* low,
                                          Bytes (*sums)[kVectors]) {
  const Digits high_digits = load_digits(high), low_digits = kHasLow ? load_digits(low) : high_digits;
  Bytes high_quads[kQuads], low_quads[kQuads];
  uint32_t unusual = 0;
  for (int quad = 0; quad < kQuads; ++quad) {
    Bytes of_high[4], of_low[4], least = V(set1_epi8)(-1);
    for (int i = 0; i < 4; ++i) {
      const Bytes column = load_columns(codes, stride, quad, i);
      const Coarse weights = coarse_weights(column);
      least = V(min_epu8)(least, magnitude_class(column));
      of_high[i] = add_pairs(V(madd_epi16)(weights.first, high_digits.first), weights.second, high_digits.second);
      if (kHasLow) {
        of_low[i] = add_pairs(V(madd_epi16)(weights.first, low_digits.first), weights.second, low_digits.second);
      }
    }
    unusual |= static_cast<uint32_t>(any_below_coarse(least)) << quad;
    high_quads[quad] = sum_of_four(of_high);
    if (kHasLow) {
      low_quads[quad] = sum_of_four(of_low);
    }
  }
  join_quads(high_quads, sums[0]);
  if (kHasLow) {
    join_quads(low_quads, sums[1]);
  }
  return unusual;
}

// False, having done nothing, if a weight is a NaN.
SGL_KERNEL_EXT_INLINE bool multiply_row(const PackedRow& row, const uint8_t* codes, int64_t k, int64_t block,
                                        const int32_t* weight_scales, float* total) {
  const int16_t *high = row.high + block * kBlock, *low = row.low + block * kBlock;
  const BlockInfo info = row.blocks[block];
  Bytes sums[2][kVectors] = {};
  const uint32_t unusual =
      info.has_low ? digit_sums<true>(codes, k, high, low, sums) : digit_sums<false>(codes, k, high, low, sums);
  FineWeights fine;
  fine.count = 0;
  for (uint32_t left = unusual; left != 0; left &= left - 1) {
    constexpr int kColumns = kTile / kQuads;
    if (!find_fine(codes, k, __builtin_ctz(left) * kColumns, kColumns, &fine)) {
      return false;
    }
  }
  finish_block(sums, fine, high, low, info, weight_scales, total);
  return true;
}

bool multiply(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const uint8_t* codes, int64_t k,
              int64_t block, const int32_t* weight_scales, float* total) {
  if (num_rows > 1) {
    return multiply_panel(packed, rows, num_rows, codes, k, block, weight_scales, total);
  }
  return multiply_row(PackedRow(packed + rows[0] * PackedRow::nbytes(k), k), codes, k, block, weight_scales, total);
}

#else

bool multiply(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const uint8_t* codes, int64_t k,
              int64_t block, const int32_t* weight_scales, float* total) {
  FineWeights fine;
  fine.count = 0;
  if (!find_fine(codes, k, 0, kTile, &fine)) {
    return false;
  }
  int16_t coarse[kTile][kBlock];
  for (int c = 0; c < kTile; ++c) {
    for (int i = 0; i < kBlock; ++i) {
      const uint8_t code = codes[c * k + i];
      coarse[c][i] = static_cast<int16_t>((code & 0x7f) < 0x20 ? 0 : kE4m3Times512.value[code] / 8);
    }
  }
  for (int64_t r = 0; r < num_rows; ++r, total += kTile) {
    const PackedRow row(packed + rows[r] * PackedRow::nbytes(k), k);
    const int16_t *high = row.high + block * kBlock, *low = row.low + block * kBlock;
    const BlockInfo info = row.blocks[block];
    int32_t sums[2][kTile] = {};
    for (int c = 0; c < kTile; ++c) {
      for (int i = 0; i < kBlock; ++i) sums[0][c] += high[i] * coarse[c][i];
      for (int i = 0; i < kBlock; ++i) sums[1][c] += low[i] * coarse[c][i];
    }
    float before[kTile];
    __builtin_memcpy(before, total, sizeof(before));
    add_both(sums[0], sums[1], info, weight_scales, total);
    add_fine(fine, sums[0], sums[1], high, low, info, weight_scales, before, total);
  }
  return true;
}

#endif

}  // namespace

void tile_e4m3(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const StoredWeight& weight, int64_t column,
               [[maybe_unused]] const uint8_t* next, float* total, bool* careful) {
  const int64_t k = weight.k, blocks = k / kBlock;
  // The columns of a tile may lie on two sides of a border between scales.
  const uint8_t* scales[2] = {weight.scales + column / kBlock * blocks,
                              weight.scales + (column + kTile - 1) / kBlock * blocks};
  const int32_t border = static_cast<int32_t>(kBlock - column % kBlock);
  uint8_t lowest = 255, highest = 0;
  for (int64_t i = 0; i < blocks; ++i) {
    for (int side = 0; side < 2; ++side) {
      lowest = scales[side][i] < lowest ? scales[side][i] : lowest;
      highest = scales[side][i] > highest ? scales[side][i] : highest;
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    PackedRowHeader header;
    __builtin_memcpy(&header, packed + rows[r] * PackedRow::nbytes(k), sizeof(header));
    careful[r] = header.careful || highest > kLargestFiniteScale || header.lowest_scale + lowest < kLowestScales ||
                 header.highest_scale + highest > kHighestScales;
    for (int64_t c = 0; c < kTile; ++c) total[r * kTile + c] = 0.0f;
  }
  const uint8_t* codes = weight.codes + column * k;
#if defined(__AVX512VBMI__)
  if (num_rows == 1) {
    const uint8_t* row = packed + rows[0] * PackedRow::nbytes(k);
    careful[0] |= !multiply_row(row, codes, k, next, scales, border, total);
    return;
  }
#endif
  for (int64_t block = 0; block < blocks; ++block, codes += kBlock) {
    alignas(64) int32_t weight_scales[kTile];
    const int32_t first = scales[0][block], second = scales[1][block];
    for (int32_t c = 0; c < kTile; ++c) weight_scales[c] = c < border ? first : second;
    if (!multiply(packed, rows, num_rows, codes, k, block, weight_scales, total)) {
      for (int64_t r = 0; r < num_rows; ++r) careful[r] = true;
      return;
    }
  }
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
