// How rows and weights lie in memory for products with e2m1 weights. Included by e2m1_*_loops.cpp alone.
//
// An input a is an integer of 18 bits and a sign (its code times 2^9), a weight u one of 0..24 (twice its value, plus
// 12). a = 8 * (256 * high + low) + fine with bytes high, low, fine, and sum(a * w) = sum(a * u) - 12 * sum(a). `fine`
// is only multiplied where a block has any, which takes values below 1/3584 of the block's largest.
//
// Why this is exact: a pair of byte products is at most 2 * 24 * 128 = 6144, and at most two pairs are added in int16;
// the whole sum is below 32 * 24 * 229376 < 2^28. Its conversion to float32 rounds once, as the definition does, and
// the scale is a power of two whose product is normal (`kLowestScales`).
#pragma once

#include "simd.h"
#include "stored_loops.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

#if defined(__AVX512BW__)
constexpr int kGroup = 4;  // blocks side by side, one per 128-bit lane
#elif defined(__AVX2__)
constexpr int kGroup = 2;
#else
constexpr int kGroup = 1;
#endif

constexpr int64_t kBlockBytes = kBlock / 2;
constexpr int64_t kGroupBytes = kGroup * kBlockBytes;
constexpr int kDigits = 3;                        // high, low, fine
constexpr int kOffset = 12;                       // makes weights unsigned
constexpr int kUnit = 10;                         // integers are 2^10 times the product of two codes' values
constexpr int kLowestScales = 254 - 126 + kUnit;  // of input and weight together; the smallest product is then normal
constexpr int kHighestScales = 254 + 127 + kUnit;

// Layout of a packed row: header, then per group: `kDigits` times (even inputs, odd inputs) of kGroupBytes, 12 * sum(a)
// per block, input scale code - 137 per block, and whether `fine` is not all zero.
struct GroupTail {
  int32_t sums[4];
  int32_t exponents[4];
  int32_t has_fine;
  int32_t unused[7];
};
constexpr int64_t kDigitBytes = 2 * kGroupBytes;
constexpr int64_t kGroupRow = kDigits * kDigitBytes + static_cast<int64_t>(sizeof(GroupTail));

SGL_KERNEL_EXT_INLINE int64_t groups_of(int64_t k) { return (k / kBlock + kGroup - 1) / kGroup; }

}  // namespace

// The weights and scales of one group of blocks for the columns of a tile; the last group is padded with zeros. next:
// as many bytes of the next tile, in the order in which it lies.
struct GroupWeights {
  const uint8_t* codes;
  int64_t codes_stride;
  const uint8_t* scales;
  int64_t scales_stride;
  const uint8_t* next;
};

// With byte dot products (AVX512_VNNI) only: the columns of a tile by one group of blocks, added to total
// [num_rows][16]. `packed` points to that group of row 0.
void multiply_panel(const uint8_t* packed, int64_t row_bytes, const int32_t* rows, int64_t num_rows,
                    const GroupWeights& group, float* total);

}  // namespace sgl_kernel_ext::CPU_LEVEL
