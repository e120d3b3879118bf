// Hot loops of products with stored weights (e4m3 or e2m1 codes, ue8m0 scales). Built once per CPU level.
//
//     total = 0; for each block of 32 inputs, in order: total += float32(exact sum of the block's 32 products)
//
// where the inputs are rounded to e4m3 / ue8m0 per 32 first. A block is summed in float64 (e4m3 weights) or in int32
// (e2m1 weights), both without any rounding, so the order within a block does not exist as far as bits go.
#pragma once

#include <cstdint>

#include "e4m3_block_loops.h"

namespace sgl_kernel_ext {

constexpr int64_t kTile = 16;  // columns of the result that are computed together

// codes: e4m3 [n, k], scales [ceil(n / 32), k / 32]; or e2m1, two per byte, [n, k / 2], scales [n, k / 32].
struct StoredWeight {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t n, k;
  bool is_e2m1;
};

// Rows of the input as the loops want them: each `row_bytes` long, starting with this header.
struct PackedRowHeader {
  int32_t lowest_scale, highest_scale;  // ue8m0 codes
  bool careful;                         // a value is no finite bfloat16 once rounded
};

// pack_*: one row of k bfloat16 -> packed row (64-byte aligned, `packed_row_bytes_*(k)` long).
// tile_*: columns [column, column + 16) of the products of the packed rows `rows[0 .. num_rows)` -> total
// [num_rows][16].
//   next: weights of the tile that will run next, which may be fetched already; any address will do.
//   careful[i] is set where a row must be computed by `careful_sum` instead, as codes or scales are beyond what the
//   fast way is exact for (NaN, infinities, results near the ends of float32's range).
#define SGL_KERNEL_EXT_DECLARE_STORED_LOOPS(level)                                                         \
  namespace level {                                                                                        \
  int64_t packed_row_bytes_e4m3(int64_t k);                                                                \
  int64_t packed_row_bytes_e2m1(int64_t k);                                                                \
  void pack_e4m3(const uint16_t* x, int64_t k, uint8_t* packed);                                           \
  void pack_e2m1(const uint16_t* x, int64_t k, uint8_t* packed);                                           \
  void tile_e4m3(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const StoredWeight& weight, \
                 int64_t column, const uint8_t* next, float* total, bool* careful);                        \
  void tile_e2m1(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const StoredWeight& weight, \
                 int64_t column, const uint8_t* next, float* total, bool* careful);                        \
  float careful_sum(const uint16_t* rounded_x, const StoredWeight& weight, int64_t column);                \
  }

SGL_KERNEL_EXT_DECLARE_STORED_LOOPS(generic)
SGL_KERNEL_EXT_DECLARE_STORED_LOOPS(avx2)
SGL_KERNEL_EXT_DECLARE_STORED_LOOPS(avx512)

}  // namespace sgl_kernel_ext
