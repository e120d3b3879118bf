// Products with e4m3 weights. Compiled once per CPU level; see e4m3_block_loops.cpp for what that forbids.
//
// Why a block's sum is exact in float64: codes are integers below 2^18 times 2^-9, a product is below 2^36 times 2^-18,
// and 32 of them stay below 2^41 < 2^53. Block scales are powers of two.

#include "simd.h"
#include "stored_loops.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

constexpr int kColumns = 8;  // two of these are a tile
constexpr int kSteps = kBlock / 8;
constexpr int kInputShift = 1000;         // inputs are held times 2^1000, as the weights come out times 2^-1016
constexpr int kLargestFiniteScale = 246;  // 448 * 2^(247 - 127) is beyond float32

struct Table {
  double value[256];
};

constexpr Table make_table() {
  Table table{};
  for (int code = 0; code < 256; ++code) {
    const uint64_t bits = (static_cast<uint64_t>(code & 0x80) << 56) | (static_cast<uint64_t>(code & 0x7f) << 49);
    table.value[code] = __builtin_bit_cast(double, bits) * 0x1p+1000 * 0x1p+1016;
  }
  return table;
}
constexpr Table kE4m3TimesShift = make_table();

// Layout of a packed row: header, one float64 scale per block, k float64 values.
SGL_KERNEL_EXT_INLINE int64_t scales_offset() { return 64; }
SGL_KERNEL_EXT_INLINE int64_t values_offset(int64_t blocks) { return 64 + (blocks * 8 + 63) / 64 * 64; }

SGL_KERNEL_EXT_INLINE double weight_scale(uint8_t code) { return power_of_two(code - 127); }

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

}  // namespace

int64_t packed_row_bytes_e4m3(int64_t k) { return values_offset(k / kBlock) + 8 * k; }

void pack_e4m3(const uint16_t* x, int64_t k, uint8_t* packed) {
  const int64_t blocks = k / kBlock;
  PackedRowHeader header{255, 0, false};
  double* scales = reinterpret_cast<double*>(packed + scales_offset());
  double* values = reinterpret_cast<double*>(packed + values_offset(blocks));
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
    header.careful |= nan || scale > kLargestFiniteScale;
  }
  __builtin_memcpy(packed, &header, sizeof(header));
}

void tile_e4m3(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const StoredWeight& weight, int64_t column,
               float* total, bool* careful) {
  const int64_t k = weight.k, blocks = k / kBlock, row_bytes = packed_row_bytes_e4m3(k);
  for (int64_t r = 0; r < num_rows; ++r) {
    PackedRowHeader header;
    __builtin_memcpy(&header, packed + rows[r] * row_bytes, sizeof(header));
    careful[r] = header.careful;
    for (int64_t c = 0; c < kTile; ++c) total[r * kTile + c] = 0.0f;
  }
  double panel[kColumns * kBlock];
  for (int64_t half = 0; half < kTile; half += kColumns, column += kColumns, total += kColumns) {
    const uint8_t* codes = weight.codes + column * k;
    const uint8_t* scales = weight.scales + column / kBlock * blocks;
    const bool two_scales = column / kBlock != (column + kColumns - 1) / kBlock;
    if (two_scales || is_unusual(codes, scales, k)) {
      for (int64_t r = 0; r < num_rows; ++r) careful[r] = true;
      continue;
    }
    for (int64_t block = 0; block < blocks; ++block, codes += kBlock) {
      const double scale = weight_scale(scales[block]);
      const auto row = [&](int64_t r, const auto& weights) {
        const uint8_t* start = packed + rows[r] * row_bytes;
        const double* values = reinterpret_cast<const double*>(start + values_offset(blocks)) + block * kBlock;
        const double row_scale = reinterpret_cast<const double*>(start + scales_offset())[block];
        add_block(values, row_scale * scale, total + r * kTile, weights);
      };
      if (num_rows == 1) {
        row(0, [&](int c, int step) __attribute__((always_inline)) { return load8_e4m3(codes + c * k + 8 * step); });
        continue;
      }
      for (int c = 0; c < kColumns; ++c) {
        for (int step = 0; step < kSteps; ++step) {
          store8(panel + c * kBlock + 8 * step, load8_e4m3(codes + c * k + 8 * step));
        }
      }
      for (int64_t r = 0; r < num_rows; ++r) {
        row(r, [&](int c, int step) __attribute__((always_inline)) { return load8(panel + c * kBlock + 8 * step); });
      }
    }
  }
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
