// Rounds and packs inputs for products with e2m1 weights. Compiled once per CPU level; see e4m3_block_loops.cpp for
// what that forbids.

#include "e2m1_layout.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

struct Table {
  int32_t value[256];
};

constexpr Table make_table() {
  Table table{};
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    const int magnitude = exponent == 0 ? mantissa : (8 + mantissa) << (exponent - 1);
    table.value[code] = (code & 0x80) != 0 ? -magnitude : magnitude;
  }
  return table;
}
constexpr Table kE4m3Times512 = make_table();

}  // namespace

int64_t packed_row_bytes_e2m1(int64_t k) { return 64 + groups_of(k) * kGroupRow; }

void pack_e2m1(const uint16_t* x, int64_t k, uint8_t* packed) {
  PackedRowHeader header{255, 0, false};
  const int64_t blocks = k / kBlock;
  for (int64_t g = 0; g < groups_of(k); ++g) {
    uint8_t* group = packed + 64 + g * kGroupRow;
    GroupTail tail{};
    for (int lane = 0; lane < kGroup; ++lane) {
      uint8_t codes[kBlock] = {}, scale = 127;
      const int64_t block = g * kGroup + lane;
      if (block < blocks) {
        quantize_e4m3(x + block * kBlock, codes, &scale, 1);
        header.lowest_scale = scale < header.lowest_scale ? scale : header.lowest_scale;
        header.highest_scale = scale > header.highest_scale ? scale : header.highest_scale;
      }
      int32_t sum = 0;
      for (int64_t i = 0; i < kBlock; ++i) {
        header.careful |= (codes[i] & 0x7f) == 0x7f;
        const int32_t a = kE4m3Times512.value[codes[i]];
        const int32_t coarse = (a + 4) >> 3, high = (coarse + 128) >> 8;
        const int32_t digits[kDigits] = {high, coarse - 256 * high, a - 8 * coarse};
        for (int d = 0; d < kDigits; ++d) {
          group[d * kDigitBytes + (i % 2) * kGroupBytes + lane * kBlockBytes + i / 2] = static_cast<uint8_t>(digits[d]);
        }
        tail.has_fine |= digits[2];
        sum += a;
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
