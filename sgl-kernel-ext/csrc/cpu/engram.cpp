// Ops `look_up` and `fuse` of the n-gram memory.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "checks.h"
#include "dispatch.h"
#include "rows.h"

namespace sgl_kernel_ext {
namespace {

at::Tensor look_up(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& rows) {
  check("look_up", "codes", codes, at::kByte, 2);
  check("look_up", "scales", scales, at::kByte, 2);
  const int64_t num_rows = codes.size(0), d = codes.size(1);
  TORCH_CHECK_VALUE(d % 32 == 0, "look_up: rows must be a multiple of 32 codes, got shape ", codes.sizes(), " of ",
                    codes.scalar_type());
  check_shape("look_up", "scales", scales, {num_rows, d / 32});
  check("look_up", "rows", rows, at::kLong, 2);
  const int64_t* row = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.numel(); ++i) {
    TORCH_CHECK_INDEX(0 <= row[i] && row[i] < num_rows, "look_up: row ", row[i], " is not in the table of ", num_rows);
  }
  at::Tensor result = at::empty({rows.size(0), rows.size(1) * d}, codes.options().dtype(at::kBFloat16));
  uint16_t* out = mutable_bfloat16_bits(result);
  const auto loop = SGL_KERNEL_EXT_CHOOSE(dequantize_e4m3);
  at::parallel_for(0, rows.numel(), rows_per_task(d), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      loop(bytes(codes) + row[i] * d, bytes(scales) + row[i] * (d / 32), d, out + i * d);
    }
  });
  return result;
}

at::Tensor fuse(const at::Tensor& streams, const at::Tensor& keys_value, const at::Tensor& qk_weight, double eps,
                const std::optional<at::Tensor>& alive) {
  check("fuse", "streams", streams, at::kBFloat16, 3);
  const int64_t rows = streams.size(0), n = streams.size(1), d = streams.size(2);
  check("fuse", "keys_value", keys_value, at::kBFloat16, 2);
  check_shape("fuse", "keys_value", keys_value, {rows, (n + 1) * d});
  check("fuse", "qk_weight", qk_weight, at::kFloat, 2);
  check_shape("fuse", "qk_weight", qk_weight, {n, d});
  const bool* lives = nullptr;
  if (alive.has_value()) {
    check("fuse", "alive", *alive, at::kBool, 1);
    check_shape("fuse", "alive", *alive, {rows});
    lives = alive->const_data_ptr<bool>();
  }
  at::Tensor result = at::empty_like(streams);
  uint16_t* out = mutable_bfloat16_bits(result);
  const auto loop = SGL_KERNEL_EXT_CHOOSE(fuse);
  at::parallel_for(0, rows, rows_per_task(n * d), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      loop(bfloat16_bits(streams) + r * n * d, bfloat16_bits(keys_value) + r * (n + 1) * d,
           qk_weight.const_data_ptr<float>(), n, d, static_cast<float>(eps), lives == nullptr || lives[r] ? 1.0f : 0.0f,
           out + r * n * d);
    }
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_kernel_ext, m) {
  m.def("look_up(Tensor codes, Tensor scales, Tensor rows) -> Tensor");
  m.def("fuse(Tensor streams, Tensor keys_value, Tensor qk_weight, float eps, Tensor? alive) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext, CPU, m) {
  m.impl("look_up", &look_up);
  m.impl("fuse", &fuse);
}

}  // namespace sgl_kernel_ext
