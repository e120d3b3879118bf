// Products with e4m3 weights in float64, and the choice of the way. Compiled once per CPU level; see
// e4m3_block_loops.cpp for what that forbids.
//
// Why a block's sum is exact in float64: codes are integers below 2^18 times 2^-9, a product is below 2^36 times 2^-18,
// and 32 of them stay below 2^41 < 2^53. Block scales are powers of two.

#include "e4m3_layout.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

constexpr int kColumns = 8;  // two of these are a tile
constexpr int kSteps = kBlock / 8;
constexpr int kLargestFiniteScale = 246;  // 448 * 2^(247 - 127) is beyond float32

// Eight columns by one row and one block, for weights given by `weights(column, step)`.
template <typename Weights>
SGL_KERNEL_EXT_INLINE void add_block(const double* x, double scale, float* total, const Weights& weights) {
  Eight sums[kColumns];
  for (int c = 0; c < kColumns; ++c) sums[c] = zero8();
  for (int step = 0; step < kSteps; ++step) {
    const Eight input = load8(x + 8 * step);
    for (int c = 0; c < kColumns; ++c) add_product8(sums[c], input, weights(c, step));
  }
  const Eight block = sum_lanes8(sums);
  for (int i = 0; i < kParts; ++i) {
    Floats before;
    __builtin_memcpy(&before, total + i * kLanes, sizeof(before));
    const Floats after = before + __builtin_convertvector(block.part[i] * all(scale), Floats);
    __builtin_memcpy(total + i * kLanes, &after, sizeof(after));
  }
}

// A NaN among codes, or a scale whose products leave float32.
bool is_unusual(const uint8_t* codes, const uint8_t* scales, int64_t k) {
  uint8_t largest = 0;
  for (int64_t c = 0; c < kColumns; ++c) {
    for (int64_t i = 0; i < k; ++i) {
      const uint8_t magnitude = codes[c * k + i] & 0x7f;
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  uint8_t largest_scale = 0;
  for (int64_t i = 0; i < k / kBlock; ++i) largest_scale = scales[i] > largest_scale ? scales[i] : largest_scale;
  return largest == 0x7f || largest_scale > kLargestFiniteScale;
}

// Eight columns by some rows and one block. codes: of the first column, at the block.
void multiply_block(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const uint8_t* codes, int64_t k,
                    int64_t block, uint8_t scale_code, float* total) {
  const int64_t blocks = k / kBlock;
  const double scale = power_of_two(scale_code - 127);
  const auto row = [&](int64_t r, const auto& weights) {
    const uint8_t* start = packed + rows[r] * row_bytes(blocks);
    const double* values = reinterpret_cast<const double*>(start + values_offset(blocks)) + block * kBlock;
    const double row_scale = reinterpret_cast<const double*>(start + scales_offset())[block];
    add_block(values, row_scale * scale, total + r * kTile, weights);
  };
  if (num_rows == 1) {
    row(0, [&](int c, int step) __attribute__((always_inline)) { return load8_e4m3(codes + c * k + 8 * step); });
    return;
  }
  double panel[kColumns * kBlock];
  for (int c = 0; c < kColumns; ++c) {
    for (int step = 0; step < kSteps; ++step) {
      store8(panel + c * kBlock + 8 * step, load8_e4m3(codes + c * k + 8 * step));
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    row(r, [&](int c, int step) __attribute__((always_inline)) { return load8(panel + c * kBlock + 8 * step); });
  }
}

}  // namespace

void tile_e4m3(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const StoredWeight& weight, int64_t column,
               float* total, bool* careful) {
  const int64_t k = weight.k, blocks = k / kBlock;
  for (int64_t r = 0; r < num_rows; ++r) {
    PackedRowHeader header;
    __builtin_memcpy(&header, packed + rows[r] * row_bytes(blocks), sizeof(header));
    careful[r] = header.careful;
    for (int64_t c = 0; c < kTile; ++c) total[r * kTile + c] = 0.0f;
  }
  const uint8_t* codes = weight.codes + column * k;
  const uint8_t* scales[2];
  for (int half = 0; half < 2; ++half) {
    const int64_t first = column + half * kColumns, last = first + kColumns - 1;
    scales[half] = weight.scales + first / kBlock * blocks;
    if (first / kBlock != last / kBlock || is_unusual(codes + half * kColumns * k, scales[half], k)) {
      for (int64_t r = 0; r < num_rows; ++r) careful[r] = true;
      return;
    }
  }
  for (int64_t block = 0; block < blocks; ++block, codes += kBlock) {
#if defined(__AVX512VNNI__)
    constexpr int64_t kFewestForPanel = 4;  // so many rows pay for one
    if (num_rows >= kFewestForPanel && scales[0] == scales[1] &&
        multiply_integers(packed, rows, num_rows, codes, k, block, scales[0][block], total)) {
      continue;
    }
#endif
    for (int half = 0; half < 2; ++half) {
      multiply_block(packed, rows, num_rows, codes + half * kColumns * k, k, block, scales[half][block],
                     total + half * kColumns);
    }
  }
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
