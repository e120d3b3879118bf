// Products with e4m3 weights for one row, in byte dot products. Compiled once per CPU level; see e4m3_block_loops.cpp
// for what that forbids, and e4m3_layout.h for why the sums are exact.
//
// Sixty-four codes of a column, two blocks, are taken at a time. A coarse weight is 128 * high + low; these digits, and
// fine weights, are looked up by the code without its sign, which goes to the inputs. A sum of four products of digits,
// put together, is below 4 * 28672 * 14336 < 2^31.

#include "e4m3_layout.h"
#include "simd_bytes.h"

#if defined(__AVX512VBMI__)

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

constexpr int64_t kCodes = 64;

struct ByteTables {
  alignas(64) uint8_t high[2 * kCodes], low[2 * kCodes], fine[2 * kCodes];
};

constexpr ByteTables make_byte_tables() {
  ByteTables tables{};
  for (int code = 0; code < 127; ++code) {
    const int value = kE4m3Times512.value[code], coarse = code < 0x20 ? 0 : value / 8;
    tables.high[code] = static_cast<uint8_t>(coarse / 128);
    tables.low[code] = static_cast<uint8_t>(coarse % 128);
    tables.fine[code] = static_cast<uint8_t>(code < 0x20 ? value : 0);
  }
  tables.fine[127] = 255;  // a NaN
  return tables;
}
constexpr ByteTables kByteTables = make_byte_tables();

struct ByteTable {
  Bytes first, second;
  SGL_KERNEL_EXT_INLINE explicit ByteTable(const uint8_t* table)
      : first(load_bytes(table)), second(load_bytes(table + kCodes)) {}
  SGL_KERNEL_EXT_INLINE Bytes operator[](Bytes codes) const { return _mm512_permutex2var_epi8(first, codes, second); }
};

// Digits of the inputs of two blocks.
struct BlockPair {
  Bytes first, second, low;
};

SGL_KERNEL_EXT_INLINE Bytes signed_as(__mmask64 negative, Bytes x) {
  return _mm512_mask_blend_epi8(negative, x, _mm512_sub_epi8(Bytes{}, x));
}

// The first and the second block's columns, of four quads of lane sums.
SGL_KERNEL_EXT_INLINE void join(const Bytes* quads, Bytes* blocks) {
  Bytes halves[2];
  for (int i = 0; i < 2; ++i) {
    halves[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(quads[2 * i], quads[2 * i + 1], 0x88),
                                 _mm512_shuffle_i32x4(quads[2 * i], quads[2 * i + 1], 0xdd));
  }
  blocks[0] = _mm512_shuffle_i32x4(halves[0], halves[1], 0x88);
  blocks[1] = _mm512_shuffle_i32x4(halves[0], halves[1], 0xdd);
}

// Sums of sixteen columns and two blocks: of coarse and fine weights by the high and the low part of the inputs.
// Without fine weights and low parts, the last three are not set.
struct PairSums {
  Bytes coarse[2], fine[2], low_coarse[2], low_fine[2];
  bool any_fine, nan;
};

template <bool kHasLow>
SGL_KERNEL_EXT_INLINE void pair_sums(const uint8_t* codes, int64_t stride, const uint8_t* next, const BlockPair& pair,
                                     PairSums* out) {
  const ByteTable high_table(kByteTables.high), low_table(kByteTables.low);
  Bytes coarse[4], fine[4] = {}, low_coarse[4] = {}, low_fine[4] = {};
  out->any_fine = out->nan = false;
  for (int quad = 0; quad < 4; ++quad) {
    Bytes sums[4], low_sums[4], least = V(set1_epi8)(-1);
    for (int c = 0; c < 4; ++c) {
      const uint8_t* p = codes + (4 * quad + c) * stride;
      __builtin_prefetch(next + (4 * quad + c) * kCodes);
      const Bytes column = load_bytes(p);
      const __mmask64 negative = _mm512_movepi8_mask(column);
      const Bytes high = high_table[column], low = low_table[column];
      const Bytes first = signed_as(negative, pair.first), second = signed_as(negative, pair.second);
      const Bytes upper = _mm512_slli_epi32(add_dots(Bytes{}, high, first), 7);
      const Bytes middle = _mm512_slli_epi32(add_dots(add_dots(upper, high, second), low, first), 7);
      sums[c] = add_dots(middle, low, second);
      if (kHasLow) {
        const Bytes rest = signed_as(negative, pair.low);
        low_sums[c] = add_dots(_mm512_slli_epi32(add_dots(Bytes{}, high, rest), 7), low, rest);
      }
      least = _mm512_min_epu8(least, _mm512_or_si512(high, low));
    }
    coarse[quad] = sum_of_four(sums);
    if (kHasLow) {
      low_coarse[quad] = sum_of_four(low_sums);
    }
    if (__builtin_expect(_mm512_testn_epi8_mask(least, least) != 0, 0)) {
      const ByteTable fine_table(kByteTables.fine);
      Bytes largest = Bytes{};
      for (int c = 0; c < 4; ++c) {
        const Bytes column = load_bytes(codes + (4 * quad + c) * stride);
        const __mmask64 negative = _mm512_movepi8_mask(column);
        const Bytes small = fine_table[column];
        largest = _mm512_max_epu8(largest, small);
        const Bytes upper = _mm512_slli_epi32(add_dots(Bytes{}, small, signed_as(negative, pair.first)), 7);
        sums[c] = add_dots(upper, small, signed_as(negative, pair.second));
        if (kHasLow) {
          low_sums[c] = add_dots(Bytes{}, small, signed_as(negative, pair.low));
        }
      }
      out->any_fine = true;
      out->nan |= _mm512_cmpeq_epu8_mask(largest, V(set1_epi8)(-1)) != 0;
      fine[quad] = sum_of_four(sums);
      if (kHasLow) {
        low_fine[quad] = sum_of_four(low_sums);
      }
    }
  }
  join(coarse, out->coarse);
  if (kHasLow || out->any_fine) {
    join(fine, out->fine);
    join(low_coarse, out->low_coarse);
    join(low_fine, out->low_fine);
  }
}

// The sum of a block, put together in float64, where all of it is exact, and rounded: times 2^-unit, or as it is if
// there is a low part.
SGL_KERNEL_EXT_INLINE Singles exact_sum(const PairSums& sums, int64_t block, bool has_low, int unit) {
  const Doubles eight = all(8.0), high_unit = all(static_cast<double>(1 << unit));
  __m256 results[2];
  for (int half = 0; half < 2; ++half) {
    const auto wide = [&](Bytes x) __attribute__((always_inline)) {
      return _mm512_cvtepi32_pd(half == 0 ? _mm512_castsi512_si256(x) : _mm512_extracti64x4_epi64(x, 1));
    };
    Doubles sum = add_product(wide(sums.fine[block]), wide(sums.coarse[block]), eight);
    if (has_low) {
      const Doubles low = add_product(wide(sums.low_fine[block]), wide(sums.low_coarse[block]), eight);
      sum = add_product(low, sum, high_unit);
    }
    results[half] = _mm512_cvtpd_ps(sum);
  }
  return _mm512_insertf32x8(_mm512_castps256_ps512(results[0]), results[1], 1);
}

}  // namespace

bool multiply_row(const uint8_t* packed, const uint8_t* codes, int64_t k, const uint8_t* next,
                  const uint8_t* const* scales, int32_t border, float* out) {
  const BlockInfo* blocks = PackedRow(packed, k).blocks;
  const int8_t* digits = PackedRow::digits(packed, k, 0);
  const __mmask16 behind = static_cast<__mmask16>(border >= kTile ? 0 : 0xffff << border);
  Singles total = {};
  for (int64_t first = 0; first < k; first += kCodes) {
    const int64_t block = first / kBlock, count = k - first < kCodes ? 1 : 2;
    const BlockPair pair{load_bytes(digits + first), load_bytes(digits + PackedRow::padded(k) + first),
                         load_bytes(digits + 2 * PackedRow::padded(k) + first)};
    const uint8_t* columns = codes + first;
    int64_t stride = k;
    uint8_t last[kTile * kCodes];
    if (count == 1) {
      for (int64_t c = 0; c < kTile; ++c) {
        __builtin_memcpy(last + c * kCodes, columns + c * k, kBlock);
        __builtin_memset(last + c * kCodes + kBlock, 0, kBlock);
      }
      columns = last;
      stride = kCodes;
    }
    const bool has_low = blocks[block].has_low || (count == 2 && blocks[block + 1].has_low);
    const uint8_t* ahead = next + kTile * first;  // in the order in which it lies
    PairSums sums;
    if (has_low) {
      pair_sums<true>(columns, stride, ahead, pair, &sums);
    } else {
      pair_sums<false>(columns, stride, ahead, pair, &sums);
    }
    if (sums.nan) {
      return false;
    }
    for (int64_t i = 0; i < count; ++i) {
      const BlockInfo info = blocks[block + i];
      const Bytes weight_scales = _mm512_mask_blend_epi32(behind, _mm512_set1_epi32(scales[0][block + i]),
                                                          _mm512_set1_epi32(scales[1][block + i]));
      const bool exact = has_low || sums.any_fine;
      const Singles sum = exact ? exact_sum(sums, i, has_low, info.unit) : _mm512_cvtepi32_ps(sums.coarse[i]);
      const int exponent = info.scale - 127 - kUnit + (has_low ? 0 : info.unit) + (exact ? 0 : 3);
      const Bytes exponents = _mm512_slli_epi32(_mm512_add_epi32(weight_scales, _mm512_set1_epi32(exponent)), 23);
      total = total + sum * _mm512_castsi512_ps(exponents);
    }
  }
  _mm512_storeu_ps(out, total);
  return true;
}

}  // namespace sgl_kernel_ext::CPU_LEVEL

#endif
