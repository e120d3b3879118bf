// Compiled once per CPU level; see e4m3_block_loops.cpp for what that forbids.

#include "swiglu_loops.h"

#include "simd_math.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

SGL_KERNEL_EXT_INLINE float rounded(float value) { return from_bfloat16(to_bfloat16(value)); }

}  // namespace

void swiglu(const float* gate, const float* up, int64_t count, float limit, bool weighted, float weight,
            uint16_t* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    double wide[kLanes];
    for (int j = 0; j < kLanes; ++j) {
      const float value = rounded(gate[i + j]);
      wide[j] = value > limit ? limit : value;
    }
    const Doubles x = load(wide);
    const Floats silu = __builtin_convertvector(x / (all(1.0) + exp(-x)), Floats);
    for (int j = 0; j < kLanes && i + j < count; ++j) {
      const float value = rounded(up[i + j]);
      const float bounded = value > limit ? limit : value < -limit ? -limit : value;
      const float product = silu[j] * bounded;
      out[i + j] = to_bfloat16(weighted ? product * weight : product);
    }
  }
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
