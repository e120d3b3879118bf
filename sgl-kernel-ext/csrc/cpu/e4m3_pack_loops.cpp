// Rounds and packs inputs for products with e4m3 weights. Compiled once per CPU level; see e4m3_block_loops.cpp for
// what that forbids.

#include "e4m3_layout.h"

namespace sgl_kernel_ext::CPU_LEVEL {

int64_t packed_row_bytes_e4m3(int64_t k) { return PackedRow::nbytes(k); }

void pack_e4m3(const uint16_t* x, int64_t k, uint8_t* packed) {
  const int64_t blocks = k / kBlock;
  PackedRowHeader header{255, 0, false};
  BlockInfo* info = reinterpret_cast<BlockInfo*>(packed + 64);
  int16_t* high = reinterpret_cast<int16_t*>(packed + PackedRow::high_offset(blocks));
  int16_t* low = high + k;
  for (int64_t block = 0; block < blocks; ++block, high += kBlock, low += kBlock) {
    uint8_t scale;
    int32_t values[kBlock], sum = 0;
    header.careful |= !integers_e4m3(x + block * kBlock, values, &scale);
    for (int64_t i = 0; i < kBlock; ++i) sum += values[i] < 0 ? -values[i] : values[i];
    int unit = kSmallestUnit;
    // Rounding makes each |high| larger by half at most.
    while (unit < kLargestUnit && (sum >> unit) + kBlock > kLargestSum) ++unit;
    int32_t any = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      const int32_t coarse = (values[i] + (1 << unit >> 1)) >> unit;
      high[i] = static_cast<int16_t>(coarse);
      low[i] = static_cast<int16_t>(values[i] - (coarse << unit));
      any |= low[i];
    }
#if defined(__AVX512VBMI__)
    int8_t* digits = const_cast<int8_t*>(PackedRow::digits(packed, k, 0)) + block * kBlock;
    for (int64_t i = 0; i < kBlock; ++i) {
      const int32_t first = (high[i] + 64) >> 7;
      digits[i] = static_cast<int8_t>(first);
      digits[PackedRow::padded(k) + i] = static_cast<int8_t>(high[i] - 128 * first);
      digits[2 * PackedRow::padded(k) + i] = static_cast<int8_t>(low[i]);
    }
#endif
    info[block] = {scale, static_cast<int8_t>(unit), any != 0};
    header.lowest_scale = scale < header.lowest_scale ? scale : header.lowest_scale;
    header.highest_scale = scale > header.highest_scale ? scale : header.highest_scale;
  }
  header.careful |= header.highest_scale > kLargestFiniteScale;
  __builtin_memcpy(packed, &header, sizeof(header));
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
