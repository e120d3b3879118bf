// Scores of groups of keys. Built once per CPU level.
#pragma once

#include <cstdint>

namespace sgl_kernel_ext {

constexpr int64_t kKeysAtOnce = 16;
constexpr int64_t kMaxIndexBlocks = 4;

// One head's query as integers with a scale per block of 32: even inputs, then odd ones.
struct PackedQuery {
  int8_t values[kMaxIndexBlocks][32];
  int32_t sums[kMaxIndexBlocks];  // of a block's values, times 12
  float scales[kMaxIndexBlocks];  // halved
  float weight;
  int32_t lowest_scale, highest_scale;  // ue8m0 codes
};

// widen: bfloat16 as doubles, a multiple of 8.
// decode_keys: `count` index records -> [count][dim].
// score_keys: one row's heads, q [heads][dim] and weights [heads], by keys [count <= kKeysAtOnce][dim] -> out bfloat16
//   [count]: bfloat16(sum of bfloat16(relu(bfloat16(q . k)) * weight)), the sum in float64, first head to last.
//   scratch: heads * kKeysAtOnce doubles. dim: a multiple of 32.
// pack_query: one head's query, if it is small integers times a power of two per block, and dim is not too long.
// score_packed: what `score_keys` gives, from packed records of kKeysAtOnce keys; false, having done nothing, where the
//   scales lie too far apart.
#define SGL_KERNEL_EXT_DECLARE_INDEXER_LOOPS(level)                                                           \
  namespace level {                                                                                           \
  void widen(const uint16_t* x, int64_t count, double* out);                                                  \
  void decode_keys(const uint8_t* const* records, bool as_bfloat16, int64_t count, int64_t dim, double* out); \
  void score_keys(const double* q, const uint16_t* weights, int64_t heads, const double* keys, int64_t count, \
                  int64_t dim, double* scratch, uint16_t* out);                                               \
  bool pack_query(const uint16_t* q, int64_t dim, float weight, PackedQuery* out);                            \
  bool score_packed(const PackedQuery* queries, int64_t heads, const uint8_t* const* records, int64_t dim,    \
                    uint16_t* out);                                                                           \
  }

SGL_KERNEL_EXT_DECLARE_INDEXER_LOOPS(generic)
SGL_KERNEL_EXT_DECLARE_INDEXER_LOOPS(avx2)
SGL_KERNEL_EXT_DECLARE_INDEXER_LOOPS(avx512)

}  // namespace sgl_kernel_ext
