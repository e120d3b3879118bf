// How rows lie in memory for products with e4m3 weights. Included by e4m3_*_loops.cpp alone.
#pragma once

#include "simd.h"
#include "stored_loops.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

constexpr int kInputShift = 1000;  // float64 inputs are held times 2^1000, as load8_e4m3 gives weights times 2^-1016

// A block of inputs as integers (codes times 2^9): 8 * (256 * high + low) + fine.
struct IntegerBlock {
  int8_t high[kBlock], low[kBlock], fine[kBlock];
  double offset;  // -32768 * sum(256 * high + low)
  int32_t has_fine;
  int32_t unused[5];
};

#if defined(__AVX512VNNI__)
constexpr bool kHasIntegers = true;
#else
constexpr bool kHasIntegers = false;
#endif

// A packed row: header, one float64 scale per block (times 2^16), k float64 values, and where they are used the blocks
// as integers.
SGL_KERNEL_EXT_INLINE int64_t scales_offset() { return 64; }
SGL_KERNEL_EXT_INLINE int64_t values_offset(int64_t blocks) { return 64 + (blocks * 8 + 63) / 64 * 64; }
SGL_KERNEL_EXT_INLINE int64_t integers_offset(int64_t blocks) { return values_offset(blocks) + 8 * kBlock * blocks; }
SGL_KERNEL_EXT_INLINE int64_t row_bytes(int64_t blocks) {
  return integers_offset(blocks) + (kHasIntegers ? blocks * static_cast<int64_t>(sizeof(IntegerBlock)) : 0);
}

struct IntegerTable {
  int32_t value[256];
};

constexpr IntegerTable make_integers() {
  IntegerTable table{};
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    const int magnitude = exponent == 0 ? mantissa : (8 + mantissa) << (exponent - 1);
    table.value[code] = (code & 0x80) != 0 ? -magnitude : magnitude;
  }
  return table;
}
constexpr IntegerTable kE4m3Times512 = make_integers();

// The value of a code is 8 * (256 * high + low) + fine.
struct Digits {
  int32_t coarse, high, low, fine;
};

constexpr Digits digits_of(int32_t value) {
  const int32_t coarse = (value + 4) >> 3, high = (coarse + 128) >> 8;
  return {coarse, high, coarse - 256 * high, value - 8 * coarse};
}

}  // namespace

// With byte dot products (AVX512_VNNI) only: sixteen columns that share their scale, by some rows and one block, added
// to total [num_rows][16]. codes: of the first column, at the block; none is a NaN. Returns false, having done nothing,
// where the weights have so many fine parts that float64 is faster.
bool multiply_integers(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const uint8_t* codes, int64_t k,
                       int64_t block, uint8_t scale_code, float* total);

}  // namespace sgl_kernel_ext::CPU_LEVEL
