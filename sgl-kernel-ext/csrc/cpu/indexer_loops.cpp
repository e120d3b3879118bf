// Compiled once per CPU level; see e4m3_block_loops.cpp for what that forbids.

#include "indexer_loops.h"

#include "simd_dot.h"
#include "simd_record.h"

namespace sgl_kernel_ext::CPU_LEVEL {

void widen(const uint16_t* x, int64_t count, double* out) {
  for (int64_t i = 0; i < count; i += 8) store8(out + i, load8_bfloat16(x + i));
}

void decode_keys(const uint8_t* const* records, bool as_bfloat16, int64_t count, int64_t dim, double* out) {
  for (int64_t i = 0; i < count; ++i) {
    if (as_bfloat16) {
      widen(reinterpret_cast<const uint16_t*>(records[i]), dim, out + i * dim);
    } else {
      decode_index_record(records[i], dim, out + i * dim);
    }
  }
}

void score_keys(const double* q, const uint16_t* weights, int64_t heads, const double* keys, int64_t count, int64_t dim,
                double* scratch, uint16_t* out) {
  for (int64_t j = 0; j < count; j += kDotColumns) {
    all_dots(q, dim, heads, dim / 8, scratch + j, kKeysAtOnce, [&](int c, int64_t i) __attribute__((always_inline)) {
      return load8(keys + (j + c < count ? j + c : count - 1) * dim + i);
    });
  }
  double sums[kKeysAtOnce] = {};
  for (int64_t h = 0; h < heads; ++h) {
    const float weight = from_bfloat16(weights[h]);
    for (int64_t j = 0; j < count; ++j) {
      const float dot = from_bfloat16(to_bfloat16(static_cast<float>(scratch[h * kKeysAtOnce + j])));
      const float positive = dot < 0.0f ? 0.0f : dot;  // a NaN stays
      sums[j] += static_cast<double>(from_bfloat16(to_bfloat16(positive * weight)));
    }
  }
  for (int64_t j = 0; j < count; ++j) out[j] = to_bfloat16(static_cast<float>(sums[j]));
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
