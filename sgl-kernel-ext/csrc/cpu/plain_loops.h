// Hot loops of products summed in float64. Built once per CPU level.
#pragma once

#include <cstdint>

namespace sgl_kernel_ext {

constexpr int64_t kPlainTile = 4;  // columns of the result that are computed together

enum class WeightKind { float32, bfloat16, e4m3, e2m1 };

// data [n, k] (e2m1: two codes per byte). e4m3: scales [ceil(n / 32), ceil(k / 32)]; e2m1: scales [n, k / 32].
struct PlainWeight {
  const void* data;
  const uint8_t* scales;
  int64_t n, k;
  WeightKind kind;
};

// Room that `plain_tile` needs for its own use, in doubles: four columns and their block scales.
inline int64_t plain_scratch(int64_t k) { return kPlainTile * ((k + 7) / 8 * 8 + (k + 31) / 32); }

// widen_*: `count` inputs as doubles, padded with zeros to a multiple of eight.
// plain_tile: `columns` (1 to 4) columns from `column` on, of the product of x [num_rows][stride], as widened for this
//   kind of weight -> out [num_rows][4]. Lane j of eight sums the inputs k % 8 == j in order, and the lanes are added
//   in a fixed tree; so a row's result depends on nothing but the row.
#define SGL_KERNEL_EXT_DECLARE_PLAIN_LOOPS(level)                                                               \
  namespace level {                                                                                             \
  void widen_bfloat16(const uint16_t* x, int64_t count, WeightKind kind, double* out);                          \
  void widen_float(const float* x, int64_t count, WeightKind kind, double* out);                                \
  void plain_tile(const double* x, int64_t stride, int64_t num_rows, const PlainWeight& weight, int64_t column, \
                  int64_t columns, double* scratch, double* out);                                               \
  }

SGL_KERNEL_EXT_DECLARE_PLAIN_LOOPS(generic)
SGL_KERNEL_EXT_DECLARE_PLAIN_LOOPS(avx2)
SGL_KERNEL_EXT_DECLARE_PLAIN_LOOPS(avx512)

}  // namespace sgl_kernel_ext
