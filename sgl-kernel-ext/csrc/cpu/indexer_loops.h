// Scores of groups of keys. Built once per CPU level.
#pragma once

#include <cstdint>

namespace sgl_kernel_ext {

constexpr int64_t kKeysAtOnce = 16;

// widen: bfloat16 as doubles, a multiple of 8.
// decode_keys: `count` index records, `stride` bytes apart -> [count][dim].
// score_keys: one row's heads, q [heads][dim] and weights [heads], by keys [count <= kKeysAtOnce][dim] -> out bfloat16
//   [count]: bfloat16(sum of bfloat16(relu(bfloat16(q . k)) * weight)), the sum in float64, first head to last.
//   scratch: heads * kKeysAtOnce doubles. dim: a multiple of 32.
#define SGL_KERNEL_EXT_DECLARE_INDEXER_LOOPS(level)                                                           \
  namespace level {                                                                                           \
  void widen(const uint16_t* x, int64_t count, double* out);                                                  \
  void decode_keys(const uint8_t* records, int64_t stride, int64_t count, int64_t dim, double* out);          \
  void score_keys(const double* q, const uint16_t* weights, int64_t heads, const double* keys, int64_t count, \
                  int64_t dim, double* scratch, uint16_t* out);                                               \
  }

SGL_KERNEL_EXT_DECLARE_INDEXER_LOOPS(generic)
SGL_KERNEL_EXT_DECLARE_INDEXER_LOOPS(avx2)
SGL_KERNEL_EXT_DECLARE_INDEXER_LOOPS(avx512)

}  // namespace sgl_kernel_ext
