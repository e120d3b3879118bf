// Packed cache records: rounding, packing and reading. Built once per CPU level.
#pragma once

#include <cstdint>

namespace sgl_kernel_ext {

// Values are bfloat16 as raw bits, `dim` of them a row; two e2m1 codes share a byte, the even index in the low nibble.
// encode_global, decode_global: e2m1 codes, then one e4m3 scale per 16.
// encode_index, decode_index: e2m1 codes, then one ue8m0 scale per 32.
// round_index: encode_index and back.
// A NaN is stored as zero and does not count in its block's largest value.
#define SGL_KERNEL_EXT_DECLARE_RECORD_LOOPS(level)                       \
  namespace level {                                                      \
  void encode_global(const uint16_t* x, int64_t dim, uint8_t* record);   \
  void encode_index(const uint16_t* x, int64_t dim, uint8_t* record);    \
  void decode_global(const uint8_t* record, int64_t dim, uint16_t* out); \
  void decode_index(const uint8_t* record, int64_t dim, uint16_t* out);  \
  void round_index(const uint16_t* x, int64_t count, uint16_t* out);     \
  }

SGL_KERNEL_EXT_DECLARE_RECORD_LOOPS(generic)
SGL_KERNEL_EXT_DECLARE_RECORD_LOOPS(avx2)
SGL_KERNEL_EXT_DECLARE_RECORD_LOOPS(avx512)

}  // namespace sgl_kernel_ext
