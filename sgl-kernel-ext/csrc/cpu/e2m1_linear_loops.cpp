// Products with packed e2m1 weights, in integers. Compiled once per CPU level; see e4m3_block_loops.cpp for what that
// forbids.
//
// An input a is an integer of 18 bits and a sign (its code times 2^9), a weight u one of 0..24 (twice its value, plus
// 12). a = 8 * (256 * high + low) + fine with bytes high, low, fine, and sum(a * w) = sum(a * u) - 12 * sum(a). `fine`
// is only multiplied where a block has any, which takes values below 1/3584 of the block's largest.
//
// Why this is exact: a pair of byte products is at most 2 * 24 * 128 = 6144 and two pairs are added in int16; the whole
// sum is below 32 * 24 * 229376 < 2^28. Its conversion to float32 rounds once, as the definition does, and the scale is
// a power of two whose product is normal (`kLowestScales`).

#include "simd.h"
#include "stored_loops.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

#if defined(__AVX512BW__)
typedef __m512i Bytes;
constexpr int kGroup = 4;  // blocks side by side, one per 128-bit lane
#elif defined(__AVX2__)
typedef __m256i Bytes;
constexpr int kGroup = 2;
#else
constexpr int kGroup = 1;
#endif

constexpr int64_t kBlockBytes = kBlock / 2;
constexpr int64_t kGroupBytes = kGroup * kBlockBytes;
constexpr int kDigits = 3;                        // high, low, fine
constexpr int kOffset = 12;                       // makes weights unsigned
constexpr int kUnit = 10;                         // integers are 2^10 times the product of two codes' values
constexpr int kLowestScales = 254 - 126 + kUnit;  // of input and weight together; the smallest product is then normal
constexpr int kHighestScales = 254 + 127 + kUnit;

// Layout of a packed row: header, then per group: `kDigits` times (even inputs, odd inputs) of kGroupBytes, 12 * sum(a)
// per block, input scale code - 137 per block, and whether `fine` is not all zero.
struct GroupTail {
  int32_t sums[4];
  int32_t exponents[4];
  int32_t has_fine;
  int32_t unused[7];
};
constexpr int64_t kDigitBytes = 2 * kGroupBytes;
constexpr int64_t kGroupRow = kDigits * kDigitBytes + static_cast<int64_t>(sizeof(GroupTail));

SGL_KERNEL_EXT_INLINE int64_t groups_of(int64_t k) { return (k / kBlock + kGroup - 1) / kGroup; }

struct Table {
  int32_t value[256];
};

constexpr Table make_table() {
  Table table{};
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    const int magnitude = exponent == 0 ? mantissa : (8 + mantissa) << (exponent - 1);
    table.value[code] = (code & 0x80) != 0 ? -magnitude : magnitude;
  }
  return table;
}
constexpr Table kE4m3Times512 = make_table();

constexpr uint8_t kE2m1Twice[8] = {0, 1, 2, 3, 4, 6, 8, 12};

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

// The weights and scales of one group of blocks for the columns of a tile; the last group is padded with zeros.
struct GroupWeights {
  const uint8_t* codes;
  int64_t codes_stride;
  const uint8_t* scales;
  int64_t scales_stride;
};

#if defined(__AVX2__)

// The few instructions that the two vector levels spell differently.
#if defined(__AVX512BW__)
#define V(name) _mm512_##name
#define VB(name) _mm512_##name##_si512
typedef __m512 Singles;
SGL_KERNEL_EXT_INLINE Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
SGL_KERNEL_EXT_INLINE void store_bytes(void* p, Bytes v) { _mm512_storeu_si512(p, v); }
SGL_KERNEL_EXT_INLINE Bytes in_all_lanes(__m128i v) { return _mm512_broadcast_i32x4(v); }
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
SGL_KERNEL_EXT_INLINE Singles times_power(Bytes value, Bytes exponent_field) {
  return _mm512_cvtepi32_ps(value) * _mm512_castsi512_ps(_mm512_slli_epi32(exponent_field, 23));
}
#else
#define V(name) _mm256_##name
#define VB(name) _mm256_##name##_si256
typedef __m256 Singles;
SGL_KERNEL_EXT_INLINE Bytes load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
SGL_KERNEL_EXT_INLINE void store_bytes(void* p, Bytes v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
SGL_KERNEL_EXT_INLINE Bytes in_all_lanes(__m128i v) { return _mm256_broadcastsi128_si256(v); }
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
SGL_KERNEL_EXT_INLINE Singles times_power(Bytes value, Bytes exponent_field) {
  return _mm256_cvtepi32_ps(value) * _mm256_castsi256_ps(_mm256_slli_epi32(exponent_field, 23));
}
#endif

struct EvenOdd {
  Bytes even, odd;
};

SGL_KERNEL_EXT_INLINE EvenOdd unpack(const uint8_t* codes) {
  const Bytes table = in_all_lanes(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
  const Bytes packed = load_bytes(codes), low = V(set1_epi8)(15);
  return {V(shuffle_epi8)(table, VB (and)(packed, low)),
          V(shuffle_epi8)(table, VB (and)(V(srli_epi16)(packed, 4), low))};
}

SGL_KERNEL_EXT_INLINE Bytes pair_sums(const EvenOdd& weights, const uint8_t* digits) {
  return V(add_epi16)(V(maddubs_epi16)(weights.even, load_bytes(digits)),
                      V(maddubs_epi16)(weights.odd, load_bytes(digits + kGroupBytes)));
}

// One column by one group: four partial sums per lane.
template <bool kFine>
SGL_KERNEL_EXT_INLINE Bytes partial_sums(const EvenOdd& weights, const uint8_t* digits) {
  const Bytes coarse = V(add_epi32)(V(madd_epi16)(pair_sums(weights, digits), V(set1_epi16)(256)),
                                    V(madd_epi16)(pair_sums(weights, digits + kDigitBytes), V(set1_epi16)(1)));
  if constexpr (!kFine) {
    return coarse;
  }
  return V(add_epi32)(V(slli_epi32)(coarse, 3),
                      V(madd_epi16)(pair_sums(weights, digits + 2 * kDigitBytes), V(set1_epi16)(1)));
}

SGL_KERNEL_EXT_INLINE Bytes sum_of_four(const Bytes* x) {
  const Bytes a = V(add_epi32)(V(unpacklo_epi32)(x[0], x[1]), V(unpackhi_epi32)(x[0], x[1]));
  const Bytes b = V(add_epi32)(V(unpacklo_epi32)(x[2], x[3]), V(unpackhi_epi32)(x[2], x[3]));
  return V(add_epi32)(V(unpacklo_epi64)(a, b), V(unpackhi_epi64)(a, b));
}

template <bool kFine, typename Weights>
SGL_KERNEL_EXT_INLINE void add_group(const uint8_t* row, const Bytes* scales, float* total, const Weights& weights) {
  const GroupTail* tail = reinterpret_cast<const GroupTail*>(row + kDigits * kDigitBytes);
  const Bytes sums = per_lane(tail->sums), exponents = per_lane(tail->exponents);
  Singles blocks[4];
  for (int quad = 0; quad < 4; ++quad) {
    Bytes column[4];
    for (int c = 0; c < 4; ++c) column[c] = partial_sums<kFine>(weights(4 * quad + c), row);
    Bytes sum = sum_of_four(column);
    if constexpr (!kFine) {
      sum = V(slli_epi32)(sum, 3);
    }
    blocks[quad] = times_power(V(sub_epi32)(sum, sums), V(add_epi32)(scales[quad], exponents));
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
    add_group(packed + rows[0] * row_bytes, scales, total,
              [&](int c) __attribute__((always_inline)) { return unpack(group.codes + c * group.codes_stride); });
    return;
  }
  EvenOdd unpacked[kTile];
  for (int c = 0; c < kTile; ++c) unpacked[c] = unpack(group.codes + c * group.codes_stride);
  for (int64_t r = 0; r < num_rows; ++r) {
    add_group(packed + rows[r] * row_bytes, scales, total + r * kTile,
              [&](int c) __attribute__((always_inline)) { return unpacked[c]; });
  }
}
#undef V
#undef VB

#else

void multiply_group(const uint8_t* packed, int64_t row_bytes, const int32_t* rows, int64_t num_rows,
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

int64_t packed_row_bytes_e2m1(int64_t k) { return 64 + groups_of(k) * kGroupRow; }

void pack_e2m1(const uint16_t* x, int64_t k, uint8_t* packed) {
  PackedRowHeader header{255, 0, false};
  const int64_t blocks = k / kBlock;
  for (int64_t g = 0; g < groups_of(k); ++g) {
    uint8_t* group = packed + 64 + g * kGroupRow;
    GroupTail tail{};
    for (int lane = 0; lane < kGroup; ++lane) {
      uint8_t codes[kBlock] = {}, scale = 127;
      const int64_t block = g * kGroup + lane;
      if (block < blocks) {
        quantize_e4m3(x + block * kBlock, codes, &scale, 1);
        header.lowest_scale = scale < header.lowest_scale ? scale : header.lowest_scale;
        header.highest_scale = scale > header.highest_scale ? scale : header.highest_scale;
      }
      int32_t sum = 0;
      for (int64_t i = 0; i < kBlock; ++i) {
        header.careful |= (codes[i] & 0x7f) == 0x7f;
        const int32_t a = kE4m3Times512.value[codes[i]];
        const int32_t coarse = (a + 4) >> 3, high = (coarse + 128) >> 8;
        const int32_t digits[kDigits] = {high, coarse - 256 * high, a - 8 * coarse};
        for (int d = 0; d < kDigits; ++d) {
          group[d * kDigitBytes + (i % 2) * kGroupBytes + lane * kBlockBytes + i / 2] = static_cast<uint8_t>(digits[d]);
        }
        tail.has_fine |= digits[2];
        sum += a;
      }
      tail.sums[lane] = kOffset * sum;
      tail.exponents[lane] = scale - (127 + kUnit);
    }
    __builtin_memcpy(group + kDigits * kDigitBytes, &tail, sizeof(tail));
  }
  header.careful |= header.highest_scale > 246;  // 448 * 2^(247 - 127) is no bfloat16
  __builtin_memcpy(packed, &header, sizeof(header));
}

void tile_e2m1(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const StoredWeight& weight, int64_t column,
               float* total, bool* careful) {
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
    GroupWeights group{codes + g * kGroupBytes, weight.k / 2, scales + g * kGroup, blocks};
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
      group = {last_codes, kGroupBytes, last_scales, kGroup};
    }
    multiply_group(packed + 64 + g * kGroupRow, row_bytes, rows, num_rows, group, total);
  }
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
