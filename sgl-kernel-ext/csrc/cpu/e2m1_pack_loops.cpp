// Rounds and packs inputs for products with e2m1 weights. Compiled once per CPU level; see e4m3_block_loops.cpp for
// what that forbids.

#include "e2m1_layout.h"

namespace sgl_kernel_ext::CPU_LEVEL {

int64_t packed_row_bytes_e2m1(int64_t k) { return 64 + groups_of(k) * kGroupRow; }

void pack_e2m1(const uint16_t* x, int64_t k, uint8_t* packed) {
  PackedRowHeader header{255, 0, false};
  const int64_t blocks = k / kBlock;
  for (int64_t g = 0; g < groups_of(k); ++g) {
    uint8_t* group = packed + 64 + g * kGroupRow;
    GroupTail tail{};
    for (int lane = 0; lane < kGroup; ++lane) {
      int32_t values[kBlock] = {}, sum = 0;
      uint8_t scale = 127;
      const int64_t block = g * kGroup + lane;
      if (block < blocks) {
        header.careful |= !integers_e4m3(x + block * kBlock, values, &scale);
        header.lowest_scale = scale < header.lowest_scale ? scale : header.lowest_scale;
        header.highest_scale = scale > header.highest_scale ? scale : header.highest_scale;
      }
      uint8_t* digits = group + lane * kBlockBytes;
      for (int64_t i = 0; i < kBlock; ++i) sum += values[i];
      for (int odd = 0; odd < 2; ++odd, digits += kGroupBytes) {
        for (int64_t i = 0; i < kBlockBytes; ++i) {
          const int32_t a = values[2 * i + odd], coarse = (a + 4) >> 3, high = (coarse + 128) >> 8;
          digits[i] = static_cast<uint8_t>(high);
          digits[kDigitBytes + i] = static_cast<uint8_t>(coarse - 256 * high);
          digits[2 * kDigitBytes + i] = static_cast<uint8_t>(a - 8 * coarse);
          tail.has_fine |= a - 8 * coarse;
        }
      }
      tail.sums[lane] = kOffset * sum;
      tail.exponents[lane] = scale - (127 + kUnit);
    }
    __builtin_memcpy(group + kDigits * kDigitBytes, &tail, sizeof(tail));
  }
  header.careful |= header.highest_scale > 246;  // 448 * 2^(247 - 127) is no bfloat16
  __builtin_memcpy(packed, &header, sizeof(header));
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
