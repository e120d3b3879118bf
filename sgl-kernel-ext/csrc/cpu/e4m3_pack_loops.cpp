// Rounds and packs inputs for products with e4m3 weights. Compiled once per CPU level; see e4m3_block_loops.cpp for
// what that forbids.

#include "e4m3_layout.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

struct Table {
  double value[256];
};

constexpr Table make_table() {
  Table table{};
  for (int code = 0; code < 256; ++code) table.value[code] = kE4m3Times512.value[code] * 0x1p-9 * 0x1p+1000;
  return table;
}
constexpr Table kE4m3TimesShift = make_table();

void pack_integers(const uint8_t* codes, IntegerBlock* block) {
  int32_t sum = 0;
  block->has_fine = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    const Digits digits = digits_of(kE4m3Times512.value[codes[i]]);
    block->high[i] = static_cast<int8_t>(digits.high);
    block->low[i] = static_cast<int8_t>(digits.low);
    block->fine[i] = static_cast<int8_t>(digits.fine);
    block->has_fine |= digits.fine;
    sum += digits.coarse;
  }
  block->offset = -32768.0 * sum;
}

}  // namespace

int64_t packed_row_bytes_e4m3(int64_t k) { return row_bytes(k / kBlock); }

void pack_e4m3(const uint16_t* x, int64_t k, uint8_t* packed) {
  const int64_t blocks = k / kBlock;
  PackedRowHeader header{255, 0, false};
  double* scales = reinterpret_cast<double*>(packed + scales_offset());
  double* values = reinterpret_cast<double*>(packed + values_offset(blocks));
  IntegerBlock* integers = reinterpret_cast<IntegerBlock*>(packed + integers_offset(blocks));
  for (int64_t block = 0; block < blocks; ++block) {
    uint8_t codes[kBlock];
    uint8_t scale;
    quantize_e4m3(x + block * kBlock, codes, &scale, 1);
    scales[block] = power_of_two(scale - 127) * power_of_two(kE4m3Shift - kInputShift);
    bool nan = false;
    for (int64_t i = 0; i < kBlock; ++i) {
      nan |= (codes[i] & 0x7f) == 0x7f;
      values[block * kBlock + i] = kE4m3TimesShift.value[codes[i]];
    }
    if (kHasIntegers) {
      pack_integers(codes, integers + block);
    }
    header.careful |= nan || scale > 246;  // 448 * 2^(247 - 127) is no bfloat16
  }
  __builtin_memcpy(packed, &header, sizeof(header));
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
