// The clamped SwiGLU between an expert's products. Built once per CPU level.
#pragma once

#include <cstdint>

namespace sgl_kernel_ext {

// out[i] = bfloat16(float32(silu(min(gate, limit))) * clamp(up, -limit, limit) * weight), gate and up rounded to
// bfloat16 first, silu in float64; without `weighted` there is no last factor. Any count; gate and up may be read up to
// the next multiple of eight.
#define SGL_KERNEL_EXT_DECLARE_SWIGLU_LOOPS(level)                                                         \
  namespace level {                                                                                        \
  void swiglu(const float* gate, const float* up, int64_t count, float limit, bool weighted, float weight, \
              uint16_t* out);                                                                              \
  }

SGL_KERNEL_EXT_DECLARE_SWIGLU_LOOPS(generic)
SGL_KERNEL_EXT_DECLARE_SWIGLU_LOOPS(avx2)
SGL_KERNEL_EXT_DECLARE_SWIGLU_LOOPS(avx512)

}  // namespace sgl_kernel_ext
