#include "stored_input.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "checks.h"
#include "dispatch.h"

namespace sgl_kernel_ext {

StoredWeight stored_weight(const char* op, const at::Tensor& codes, const at::Tensor& scales, bool is_e2m1) {
  check(op, "codes", codes, at::kByte, 2);
  check(op, "scales", scales, at::kByte, 2);
  const int64_t n = codes.size(0), k = codes.size(1) * (is_e2m1 ? 2 : 1);
  TORCH_CHECK_VALUE(k % kBlock == 0, op, ": inputs must be a multiple of ", kBlock, ", got codes of shape ",
                    codes.sizes(), " of ", codes.scalar_type());
  const int64_t scale_rows = is_e2m1 ? n : (n + kBlock - 1) / kBlock;
  check_shape(op, "scales", scales, {scale_rows, k / kBlock});
  return {bytes(codes), bytes(scales), n, k, is_e2m1};
}

StoredInput::StoredInput(const uint16_t* x, int64_t num_rows, int64_t k, bool for_e2m1)
    : x_(x), num_rows_(num_rows), k_(k), for_e2m1_(for_e2m1), level_(cpu_level()) {
  row_bytes_ = for_e2m1 ? SGL_KERNEL_EXT_CHOOSE_AT(level_, packed_row_bytes_e2m1)(k)
                        : SGL_KERNEL_EXT_CHOOSE_AT(level_, packed_row_bytes_e4m3)(k);
  storage_ = at::empty({num_rows * row_bytes_ + 64}, at::kByte);
  uint8_t* start = storage_.mutable_data_ptr<uint8_t>();
  packed_ = start + (64 - reinterpret_cast<uintptr_t>(start) % 64) % 64;
}

void StoredInput::pack(int64_t begin, int64_t end) {
  const auto loop =
      for_e2m1_ ? SGL_KERNEL_EXT_CHOOSE_AT(level_, pack_e2m1) : SGL_KERNEL_EXT_CHOOSE_AT(level_, pack_e4m3);
  for (int64_t row = begin; row < end; ++row) {
    loop(x_ + row * k_, k_, packed_ + row * row_bytes_);
  }
}

void StoredInput::pack_all() {
  constexpr int64_t kValuesPerTask = 16384;
  at::parallel_for(0, num_rows_, std::max<int64_t>(1, kValuesPerTask / std::max<int64_t>(1, k_)),
                   [&](int64_t begin, int64_t end) { pack(begin, end); });
}

StoredInput::Columns StoredInput::tile(const int32_t* rows, int64_t num_rows, const StoredWeight& weight, int64_t index,
                                       float* total, const uint8_t* next) const {
  const int64_t start = index * kTile;
  if (weight.n < kTile) {
    for (int64_t r = 0; r < num_rows; ++r) careful(rows[r], weight, 0, weight.n, total + r * kTile);
    return {0, weight.n, 0};
  }
  const int64_t column = std::min(start, weight.n - kTile);
  bool unusual[kMaxRows];
  const auto loop =
      for_e2m1_ ? SGL_KERNEL_EXT_CHOOSE_AT(level_, tile_e2m1) : SGL_KERNEL_EXT_CHOOSE_AT(level_, tile_e4m3);
  loop(packed_, rows, num_rows, weight, column, next != nullptr ? next : tile_codes(weight, index + 1), total, unusual);
  for (int64_t r = 0; r < num_rows; ++r) {
    if (unusual[r]) {
      careful(rows[r], weight, column, kTile, total + r * kTile);
    }
  }
  return {start, column + kTile - start, start - column};
}

void StoredInput::careful(int64_t row, const StoredWeight& weight, int64_t column, int64_t count, float* total) const {
  std::vector<uint16_t> rounded(static_cast<size_t>(k_));
  SGL_KERNEL_EXT_CHOOSE_AT(level_, fake_quant_e4m3)(x_ + row * k_, rounded.data(), k_ / kBlock);
  const auto sum = SGL_KERNEL_EXT_CHOOSE_AT(level_, careful_sum);
  for (int64_t c = 0; c < count; ++c) total[c] = sum(rounded.data(), weight, column + c);
}

}  // namespace sgl_kernel_ext
