// Elementwise steps of one row: RMSNorm, rotation, hyper-connection streams, n-gram memory. Built once per CPU level.
//
// float32 throughout, in the order in which the formulas are written; sums in float64. bfloat16 is raw bits.
#pragma once

#include <cstdint>

namespace sgl_kernel_ext {

// A row of bfloat16 or of float32.
struct Row {
  const void* data;
  bool is_float;
};

// inverse_rms: 1 / sqrt(float32(mean of squares) + eps).
// rms_norm: x * inverse_rms * weight.
// rotate: pairs (even, odd) -> (even * cos - odd * sin, even * sin + odd * cos), of `pairs` pairs; in place is fine.
// collapse: sum of streams [n][d] times weights [n], first to last.
// expand: out [n][d], out_k = post_k * y + (comb[0][k] * stream_0 + ... ).
// fuse: out [n][d] = streams + gate_k * value; see the op `fuse`. Returns nothing that depends on other rows.
#define SGL_KERNEL_EXT_DECLARE_ROW_LOOPS(level)                                                                       \
  namespace level {                                                                                                   \
  float inverse_rms(Row x, int64_t count, float eps);                                                                 \
  void rms_norm(Row x, Row weight, int64_t count, float eps, uint16_t* out);                                          \
  void rotate(const uint16_t* x, const float* cos, const float* sin, bool inverse, int64_t pairs, uint16_t* out);     \
  void collapse(const uint16_t* streams, const float* weights, int64_t n, int64_t d, uint16_t* out);                  \
  void expand(const uint16_t* y, const uint16_t* streams, const float* post, const float* comb, int64_t n, int64_t d, \
              uint16_t* out);                                                                                         \
  void fuse(const uint16_t* streams, const uint16_t* keys_value, const float* qk_weight, int64_t n, int64_t d,        \
            float eps, float alive, uint16_t* out);                                                                   \
  void dequantize_e4m3(const uint8_t* codes, const uint8_t* scales, int64_t count, uint16_t* out);                    \
  }

SGL_KERNEL_EXT_DECLARE_ROW_LOOPS(generic)
SGL_KERNEL_EXT_DECLARE_ROW_LOOPS(avx2)
SGL_KERNEL_EXT_DECLARE_ROW_LOOPS(avx512)

}  // namespace sgl_kernel_ext
