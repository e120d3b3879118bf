// Rows of an input, rounded and packed once for products with any number of stored weights. Used by `linear` and `moe`.
#pragma once

#include <ATen/core/Tensor.h>

#include "capability.h"
#include "stored_loops.h"

namespace sgl_kernel_ext {

// Checks codes and scales (uint8, contiguous, shapes that fit) and returns the weight. Its tensors must outlive it.
StoredWeight stored_weight(const char* op, const at::Tensor& codes, const at::Tensor& scales, bool is_e2m1);

// How many tiles of columns a weight has. The last one may overlap the one before it; see `StoredInput::tile`.
inline int64_t num_tiles(int64_t n) { return (n + kTile - 1) / kTile; }

inline const uint8_t* tile_codes(const StoredWeight& weight, int64_t index) {
  return weight.codes + index * kTile * (weight.is_e2m1 ? weight.k / 2 : weight.k);
}

class StoredInput {
 public:
  // x: rows of k bfloat16, contiguous, and valid as long as this is. Nothing is packed yet.
  StoredInput(const uint16_t* x, int64_t num_rows, int64_t k, bool for_e2m1);

  // Packs rows [begin, end); threads may pack different rows at the same time.
  void pack(int64_t begin, int64_t end);

  // Packs all rows with all threads.
  void pack_all();

  struct Columns {
    int64_t first, count;  // columns of the weight; their results start at `offset` within a row of 16
    int64_t offset;
  };

  // Products of the given rows (at most kMaxRows) with one tile of columns -> total [num_rows][16]. next: the weights
  // of the tile that will run next, if it is not that of the following index.
  static constexpr int64_t kMaxRows = 64;
  Columns tile(const int32_t* rows, int64_t num_rows, const StoredWeight& weight, int64_t index, float* total,
               const uint8_t* next = nullptr) const;

 private:
  void careful(int64_t row, const StoredWeight& weight, int64_t column, int64_t count, float* total) const;

  const uint16_t* x_;
  int64_t num_rows_, k_;
  bool for_e2m1_;
  CpuLevel level_;
  int64_t row_bytes_;
  at::Tensor storage_;
  uint8_t* packed_;
};

}  // namespace sgl_kernel_ext
