// Dot products of rows of doubles. Included by *_loops.cpp alone.
#pragma once

#include "simd.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

constexpr int kDotColumns = 4;
constexpr int kDotRows = kLanes == 8 ? 4 : 1;  // as many as sums fit into registers

// kRows rows of x by four columns -> out [kRows][out_stride]. `columns(c, first)` gives eight values of column c.
template <int kRows, typename Columns>
SGL_KERNEL_EXT_INLINE void dots(const double* x, int64_t stride, int64_t steps, double* out, int64_t out_stride,
                                const Columns& columns) {
  Eight sums[kRows][kDotColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kDotColumns; ++c) sums[r][c] = zero8();
  }
  for (int64_t i = 0; i < steps * 8; i += 8) {
    Eight input[kRows];
    for (int r = 0; r < kRows; ++r) input[r] = load8(x + r * stride + i);
    for (int c = 0; c < kDotColumns; ++c) {
      const Eight column = columns(c, i);
      for (int r = 0; r < kRows; ++r) add_product8(sums[r][c], input[r], column);
    }
  }
  for (int r = 0; r < kRows; ++r) sum_lanes4(sums[r], out + r * out_stride);
}

// The same for any number of rows.
template <typename Columns>
SGL_KERNEL_EXT_INLINE void all_dots(const double* x, int64_t stride, int64_t num_rows, int64_t steps, double* out,
                                    int64_t out_stride, const Columns& columns) {
  int64_t r = 0;
  for (; r + kDotRows <= num_rows; r += kDotRows) {
    dots<kDotRows>(x + r * stride, stride, steps, out + r * out_stride, out_stride, columns);
  }
  for (; r < num_rows; ++r) dots<1>(x + r * stride, stride, steps, out + r * out_stride, out_stride, columns);
}

}  // namespace
}  // namespace sgl_kernel_ext::CPU_LEVEL
