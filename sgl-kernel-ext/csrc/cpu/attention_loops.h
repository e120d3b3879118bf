// One row of attention over window rows and global records. Built once per CPU level.
#pragma once

#include <cstdint>

namespace sgl_kernel_ext {

// dim: a multiple of 16. window: bfloat16 [num_window][dim]. pool: e2m1 records with one e4m3 scale per 16, or
// records of bfloat16, or null.
struct KeySource {
  const uint16_t* window;
  int64_t num_window;
  const uint8_t* pool;
  int64_t dim;
  bool pool_is_bfloat16;

  int64_t record_bytes() const { return pool_is_bfloat16 ? 2 * dim : dim / 2 + dim / 16; }
};

// Doubles that `attend_row` needs for its own use.
int64_t attend_scratch(int64_t heads, int64_t dim);

// q bfloat16 [heads][dim] over the entries `keys[0 .. num_keys)` (a window row, num_window + slot, or -1) -> out
// bfloat16 [heads][dim]. A head's result depends on nothing but the head.
#define SGL_KERNEL_EXT_DECLARE_ATTENTION_LOOPS(level)                                                               \
  namespace level {                                                                                                 \
  void attend_row(const uint16_t* q, int64_t heads, const KeySource& source, const int64_t* keys, int64_t num_keys, \
                  const float* sink, double* scratch, uint16_t* out);                                               \
  }

SGL_KERNEL_EXT_DECLARE_ATTENTION_LOOPS(generic)
SGL_KERNEL_EXT_DECLARE_ATTENTION_LOOPS(avx2)
SGL_KERNEL_EXT_DECLARE_ATTENTION_LOOPS(avx512)

}  // namespace sgl_kernel_ext
