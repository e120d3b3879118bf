// Hot loops of block quantisation to e4m3 with one ue8m0 scale per 32 values. Built once per CPU level.
#pragma once

#include <cstdint>

namespace sgl_kernel_ext {

constexpr int64_t kBlock = 32;

// All pointers are to contiguous memory: `blocks` * 32 values, codes or results, `blocks` scales. bfloat16 as raw bits.
// integers_e4m3: of one block, the values of the codes times 2^9; false if there is a NaN.
#define SGL_KERNEL_EXT_DECLARE_E4M3_LOOPS(level)                                          \
  namespace level {                                                                       \
  void fake_quant_e4m3(const uint16_t* x, uint16_t* out, int64_t blocks);                 \
  void quantize_e4m3(const uint16_t* x, uint8_t* codes, uint8_t* scales, int64_t blocks); \
  bool integers_e4m3(const uint16_t* x, int32_t* values, uint8_t* scale);                 \
  }

SGL_KERNEL_EXT_DECLARE_E4M3_LOOPS(generic)
SGL_KERNEL_EXT_DECLARE_E4M3_LOOPS(avx2)
SGL_KERNEL_EXT_DECLARE_E4M3_LOOPS(avx512)

}  // namespace sgl_kernel_ext
