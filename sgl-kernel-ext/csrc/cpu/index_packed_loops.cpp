// Scores of packed index keys in integers. Compiled once per CPU level; see e4m3_block_loops.cpp for what that forbids.
//
// Queries and keys are e2m1 values with a power of two per block of 32. Twice a value is an integer: of a key at most
// 12, held plus 12 as an unsigned byte; of a query at most 15 (`pack_query` refuses what is no such number). Two
// products are at most 2 * 24 * 15 and a block's sum 24 * 15 * 32 = 11520, exact in int16. Blocks are added in float32,
// which is exact where their scales lie within 2^8 of each other: 32 * 12 * 15 = 5760 < 2^13, times 2^8, times 4 blocks
// is below 2^24. Longer rows and wider scales are left to `score_keys`, in float64.

#include "indexer_loops.h"
#include "simd_bytes.h"

namespace sgl_kernel_ext::CPU_LEVEL {

#if defined(__AVX2__)

namespace {

constexpr int kKeys = static_cast<int>(kKeysAtOnce);
constexpr int kVectors = kKeys * 4 / static_cast<int>(sizeof(Bytes));
constexpr int kSteps = 4;  // of four bytes, eight codes, of each key's block
constexpr int kWidest = 8;

SGL_KERNEL_EXT_INLINE Singles all_singles(float value) { return V(set1_ps)(value); }

// A block of keys, columns in lanes.
struct KeyBlock {
  Bytes even[kSteps][kVectors], odd[kSteps][kVectors];
  Singles scales[kVectors];
};

SGL_KERNEL_EXT_INLINE Bytes add_bytes(Bytes sums, Bytes keys, Bytes query) {
  return V(add_epi16)(sums, V(maddubs_epi16)(keys, query));
}

SGL_KERNEL_EXT_INLINE Bytes four(const int8_t* p) {
  int32_t bytes;
  __builtin_memcpy(&bytes, p, 4);
  return V(set1_epi32)(bytes);
}

// Nearest even to bfloat16, for numbers.
SGL_KERNEL_EXT_INLINE Singles rounded(Singles x) {
#if defined(__AVX512BW__)
  const Bytes bits = _mm512_castps_si512(x);
#else
  const Bytes bits = _mm256_castps_si256(x);
#endif
  const Bytes odd = VB (and)(V(srli_epi32)(bits, 16), V(set1_epi32)(1));
  const Bytes sum = V(add_epi32)(bits, V(add_epi32)(odd, V(set1_epi32)(0x7fff)));
  const Bytes kept = VB (and)(sum, V(set1_epi32)(static_cast<int32_t>(0xffff0000u)));
#if defined(__AVX512BW__)
  return _mm512_castsi512_ps(kept);
#else
  return _mm256_castsi256_ps(kept);
#endif
}

SGL_KERNEL_EXT_INLINE Bytes pair_sums(Bytes pairs) { return V(madd_epi16)(pairs, V(set1_epi16)(1)); }

// Sums in float64, first head to last.
struct Sums {
  Eight part[kKeys / 8];
};

SGL_KERNEL_EXT_INLINE void add_singles(Sums& sums, const Singles* x) {
  float values[kKeys];
  __builtin_memcpy(values, x, sizeof(values));
  for (int i = 0; i < kKeys / 8; ++i) {
    const Eight wide = load8_float(values + 8 * i);
    for (int p = 0; p < kParts; ++p) sums.part[i].part[p] += wide.part[p];
  }
}

template <int kBlocks>
void score_blocks(const PackedQuery* queries, int64_t heads, const KeyBlock* keys, uint16_t* out) {
  Sums sums;
  for (int i = 0; i < kKeys / 8; ++i) sums.part[i] = zero8();
  for (int64_t h = 0; h < heads; ++h) {
    const PackedQuery& query = queries[h];
    Singles dots[kVectors];
    for (int v = 0; v < kVectors; ++v) dots[v] = all_singles(0.0f);
    for (int block = 0; block < kBlocks; ++block) {
      const int8_t* values = query.values[block];
      Bytes pairs[kVectors] = {};
      for (int s = 0; s < kSteps; ++s) {
        const Bytes even = four(values + 4 * s), odd = four(values + 16 + 4 * s);
        for (int v = 0; v < kVectors; ++v) {
          pairs[v] = add_bytes(add_bytes(pairs[v], keys[block].even[s][v], even), keys[block].odd[s][v], odd);
        }
      }
      const Singles scale = all_singles(query.scales[block]);
      for (int v = 0; v < kVectors; ++v) {
        const Bytes whole = V(sub_epi32)(pair_sums(pairs[v]), V(set1_epi32)(query.sums[block]));
        dots[v] = dots[v] + V(cvtepi32_ps)(whole) * keys[block].scales[v] * scale;
      }
    }
    const Singles weight = all_singles(query.weight);
    for (int v = 0; v < kVectors; ++v) {
      dots[v] = rounded(V(max_ps)(rounded(dots[v]), all_singles(0.0f)) * weight);
    }
    add_singles(sums, dots);
  }
  for (int i = 0; i < kKeys / 8; ++i) {
    double wide[8];
    store8(wide, sums.part[i]);
    for (int j = 0; j < 8; ++j) out[8 * i + j] = to_bfloat16(static_cast<float>(wide[j]));
  }
}

// False if a scale is a NaN, or too far from the others.
bool load_keys(const uint8_t* const* records, int64_t dim, int lowest, int highest, KeyBlock* keys) {
  const int64_t blocks = dim / 32;
  int least = 255, most = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    alignas(64) uint8_t codes[kKeys][16], turned[kSteps][64];
    alignas(64) int32_t scales[kKeys];
    for (int j = 0; j < kKeys; ++j) {
      __builtin_memcpy(codes[j], records[j] + 16 * block, 16);
      const int scale = records[j][dim / 2 + block];
      least = scale < least ? scale : least;
      most = scale > most ? scale : most;
      scales[j] = scale << 23;
    }
    turn_rows(codes[0], 16, turned);
    for (int v = 0; v < kVectors; ++v) {
      for (int s = 0; s < kSteps; ++s) {
        const EvenOdd weights = unpack(load_bytes(turned[s] + v * static_cast<int>(sizeof(Bytes))));
        keys[block].even[s][v] = weights.even;
        keys[block].odd[s][v] = weights.odd;
      }
      __builtin_memcpy(&keys[block].scales[v], scales + v * (kKeys / kVectors), sizeof(Bytes));
    }
  }
  // Products with the query's scales must be normal numbers, with room for sums.
  return least >= 1 && most <= 240 && (most - least) + (highest - lowest) <= kWidest && least + lowest >= 130 &&
         most + highest <= 254 + 100;
}

}  // namespace

bool pack_query(const uint16_t* q, int64_t dim, float weight, PackedQuery* out) {
  const int64_t blocks = dim / 32;
  if (blocks > kMaxIndexBlocks || !(weight - weight == 0.0f)) {
    return false;
  }
  out->weight = weight;
  int lowest = 255, highest = 0;
  for (int64_t block = 0; block < blocks; ++block, q += 32) {
    int top = 0;
    for (int i = 0; i < 32; ++i) {
      const int field = q[i] >> 7 & 255;
      top = field > top ? field : top;
    }
    // The largest value becomes 8 to 15; a block of zeros takes any scale.
    const int scale = top == 0 ? 127 : top - 3;
    if (top == 255 || scale < 3 || scale > 250) {
      return false;
    }
    const float inverse = as_float((254 - scale) << 23);
    int32_t sum = 0;
    for (int i = 0; i < 32; ++i) {
      const float value = from_bfloat16(q[i]) * inverse;
      const int8_t whole = static_cast<int8_t>(value);
      if (static_cast<float>(whole) != value) {
        return false;
      }
      out->values[block][(i % 2) * 16 + i / 2] = whole;
      sum += whole;
    }
    out->sums[block] = 12 * sum;
    out->scales[block] = as_float(scale << 23) * 0.5f;  // keys are doubled
    if (top != 0) {
      lowest = scale < lowest ? scale : lowest;
      highest = scale > highest ? scale : highest;
    }
  }
  out->lowest_scale = highest == 0 ? 127 : lowest;
  out->highest_scale = highest == 0 ? 127 : highest;
  return true;
}

bool score_packed(const PackedQuery* queries, int64_t heads, const uint8_t* const* records, int64_t dim,
                  uint16_t* out) {
  int lowest = 255, highest = 0;
  for (int64_t h = 0; h < heads; ++h) {
    lowest = queries[h].lowest_scale < lowest ? queries[h].lowest_scale : lowest;
    highest = queries[h].highest_scale > highest ? queries[h].highest_scale : highest;
  }
  KeyBlock keys[kMaxIndexBlocks];
  if (!load_keys(records, dim, lowest, highest, keys)) {
    return false;
  }
  switch (dim / 32) {
    case 1:
      score_blocks<1>(queries, heads, keys, out);
      return true;
    case 2:
      score_blocks<2>(queries, heads, keys, out);
      return true;
    case 3:
      score_blocks<3>(queries, heads, keys, out);
      return true;
    default:
      score_blocks<4>(queries, heads, keys, out);
      return true;
  }
}

#else

bool pack_query(const uint16_t*, int64_t, float, PackedQuery*) { return false; }

bool score_packed(const PackedQuery*, int64_t, const uint8_t* const*, int64_t, uint16_t*) { return false; }

#endif

}  // namespace sgl_kernel_ext::CPU_LEVEL
