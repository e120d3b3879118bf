// Ops `linear_e4m3`, `linear_e2m1`, `linear_bfloat16`, `matmul` and `grouped_linear`.

#include "linear.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "checks.h"
#include "dispatch.h"
#include "plain_loops.h"

namespace sgl_kernel_ext {
namespace {

constexpr int64_t kRowsPacked = 256;         // rows of an input held in packed form at a time
constexpr int64_t kWeightsPerTask = 131072;  // a thread's share should outweigh waking it

int64_t grain(int64_t weights_per_item) {
  return std::max<int64_t>(1, kWeightsPerTask / std::max<int64_t>(1, weights_per_item));
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t check_input(const char* op, const at::Tensor& x, int64_t k) {
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) == k, op, ": the last dimension of x must be ", k, ", got shape ",
                    x.sizes(), " of ", x.scalar_type());
  check_contiguous(op, "x", x);
  return k == 0 ? 0 : x.numel() / k;
}

at::Tensor result_like(const at::Tensor& x, int64_t n, at::ScalarType dtype) {
  auto shape = x.sizes().vec();
  shape.back() = n;
  return at::empty(shape, x.options().dtype(dtype));
}

// -- stored weights ---------------------------------------------------------------------------------------------------

// Products of one input with some weights, all of one form and k: the input is packed once for all.
std::vector<at::Tensor> stored_linears(const char* op, const at::Tensor& x, const std::vector<StoredWeight>& weights) {
  const int64_t k = weights[0].k;
  check_dtype(op, "x", x, at::kBFloat16);
  const int64_t num_rows = check_input(op, x, k);
  std::vector<at::Tensor> results;
  std::vector<uint16_t*> outs;
  int64_t tiles = 0;
  for (const StoredWeight& weight : weights) {
    TORCH_CHECK_VALUE(weight.k == k, op, ": all weights must have ", k, " inputs, got ", weight.k);
    results.push_back(result_like(x, weight.n, at::kBFloat16));
    outs.push_back(mutable_bfloat16_bits(results.back()));
    tiles += num_tiles(weight.n);
  }
  for (int64_t first = 0; first < num_rows; first += kRowsPacked) {
    const int64_t count = std::min(kRowsPacked, num_rows - first);
    StoredInput input(bfloat16_bits(x) + first * k, count, k, weights[0].is_e2m1);
    input.pack_all();
    const int64_t parts = ceil_div(count, StoredInput::kMaxRows);
    at::parallel_for(0, tiles * parts, grain(kTile * k), [&](int64_t begin, int64_t end) {
      int32_t rows[StoredInput::kMaxRows];
      float total[StoredInput::kMaxRows * kTile];
      for (int64_t task = begin; task < end; ++task) {
        const int64_t row = task % parts * StoredInput::kMaxRows, size = std::min(StoredInput::kMaxRows, count - row);
        for (int64_t r = 0; r < size; ++r) rows[r] = static_cast<int32_t>(row + r);
        int64_t tile = task / parts;
        size_t which = 0;
        for (; tile >= num_tiles(weights[which].n); ++which) tile -= num_tiles(weights[which].n);
        const int64_t n = weights[which].n;
        const auto columns = input.tile(rows, size, weights[which], tile, total);
        for (int64_t r = 0; r < size; ++r) {
          uint16_t* out = outs[which] + (first + row + r) * n + columns.first;
          for (int64_t c = 0; c < columns.count; ++c) out[c] = to_bfloat16_bits(total[r * kTile + columns.offset + c]);
        }
      }
    });
  }
  return results;
}

at::Tensor linear_e2m1(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales) {
  return stored_linears("linear_e2m1", x, {stored_weight("linear_e2m1", packed, scales, true)})[0];
}

// -- sums in float64 --------------------------------------------------------------------------------------------------

PlainWeight plain_weight(const char* op, const at::Tensor& weight, const std::optional<at::Tensor>& scales, int64_t k) {
  TORCH_CHECK_VALUE(weight.dim() == 2, op, ": the weight must have 2 dimensions, got shape ", weight.sizes(), " of ",
                    weight.scalar_type());
  check_contiguous(op, "weight", weight);
  const int64_t n = weight.size(0);
  if (!scales.has_value()) {
    TORCH_CHECK_TYPE(weight.scalar_type() == at::kFloat || weight.scalar_type() == at::kBFloat16, op,
                     ": the weight must be float32 or bfloat16, or uint8 with scales, got ", weight.scalar_type(),
                     " of shape ", weight.sizes());
    const auto kind = weight.scalar_type() == at::kFloat ? WeightKind::float32 : WeightKind::bfloat16;
    return {weight.const_data_ptr(), nullptr, n, weight.size(1), kind};
  }
  check_dtype(op, "weight", weight, at::kByte);
  check(op, "scales", *scales, at::kByte, 2);
  const bool is_e2m1 = weight.size(1) != k;
  if (is_e2m1) {
    check_shape(op, "weight", weight, {n, k / 2});
  }
  check_shape(op, "scales", *scales, {is_e2m1 ? n : ceil_div(n, kBlock), ceil_div(k, kBlock)});
  return {weight.const_data_ptr(), bytes(*scales), n, k, is_e2m1 ? WeightKind::e2m1 : WeightKind::e4m3};
}

// One group of columns with its own inputs: x rows of `width` values, of which the group's k start at `offset`.
struct PlainProduct {
  const at::Tensor& x;
  int64_t width, k;
  PlainWeight weight;
  int64_t groups;

  // store(row, column, value) for every element of the result.
  template <typename Store>
  void run(int64_t num_rows, const Store& store) const {
    const CpuLevel level = cpu_level();
    const int64_t padded = ceil_div(k, 8) * 8, rows_at_once = std::max<int64_t>(1, kRowsPacked / groups);
    const int64_t columns = weight.n / groups, tiles = ceil_div(columns, kPlainTile);
    at::Tensor storage = at::empty({std::min(rows_at_once, num_rows) * groups * padded}, at::kDouble);
    double* wide = storage.mutable_data_ptr<double>();
    const auto multiply = SGL_KERNEL_EXT_CHOOSE_AT(level, plain_tile);
    for (int64_t first = 0; first < num_rows; first += rows_at_once) {
      const int64_t count = std::min(rows_at_once, num_rows - first);
      at::parallel_for(0, count * groups, grain(k), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          widen(level, (first + i / groups) * width + i % groups * k, wide + i * padded);
        }
      });
      constexpr int64_t kRowsPerTask = 64;
      const int64_t parts = ceil_div(count, kRowsPerTask);
      at::parallel_for(0, groups * tiles * parts, grain(kPlainTile * k), [&](int64_t begin, int64_t end) {
        const std::unique_ptr<double[]> scratch(new double[static_cast<size_t>(plain_scratch(k))]);
        double out[kRowsPerTask * kPlainTile];
        for (int64_t task = begin; task < end; ++task) {
          const int64_t row = task % parts * kRowsPerTask, size = std::min(kRowsPerTask, count - row);
          const int64_t group = task / parts / tiles, tile = task / parts % tiles * kPlainTile;
          const int64_t valid = std::min(kPlainTile, columns - tile);
          multiply(wide + (row * groups + group) * padded, groups * padded, size, weight, group * columns + tile, valid,
                   scratch.get(), out);
          for (int64_t r = 0; r < size; ++r) {
            for (int64_t c = 0; c < valid; ++c) {
              store(first + row + r, group * columns + tile + c, static_cast<float>(out[r * kPlainTile + c]));
            }
          }
        }
      });
    }
  }

  void widen(CpuLevel level, int64_t at, double* out) const {
    if (x.scalar_type() == at::kFloat) {
      SGL_KERNEL_EXT_CHOOSE_AT(level, widen_float)(x.const_data_ptr<float>() + at, k, weight.kind, out);
    } else {
      SGL_KERNEL_EXT_CHOOSE_AT(level, widen_bfloat16)(bfloat16_bits(x) + at, k, weight.kind, out);
    }
  }
};

at::Tensor plain_linear(const char* op, const at::Tensor& x, const at::Tensor& weight,
                        const std::optional<at::Tensor>& scales, int64_t groups, bool to_bfloat16) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, op,
                   ": x must be float32 or bfloat16, got ", x.scalar_type(), " of shape ", x.sizes());
  TORCH_CHECK_VALUE(groups >= 1 && x.dim() >= 1 && x.size(-1) % groups == 0, op, ": the last dimension of x must be ",
                    groups, " groups, got shape ", x.sizes(), " of ", x.scalar_type());
  const PlainWeight w = plain_weight(op, weight, scales, x.size(-1) / groups);
  TORCH_CHECK_VALUE(w.n % groups == 0, op, ": the weight's rows must be ", groups, " groups, got shape ",
                    weight.sizes(), " of ", weight.scalar_type());
  const int64_t num_rows = check_input(op, x, groups * w.k);
  at::Tensor result = result_like(x, w.n, to_bfloat16 ? at::kBFloat16 : at::kFloat);
  const PlainProduct product{x, groups * w.k, w.k, w, groups};
  if (to_bfloat16) {
    uint16_t* out = mutable_bfloat16_bits(result);
    product.run(num_rows, [&](int64_t r, int64_t c, float value) { out[r * w.n + c] = to_bfloat16_bits(value); });
  } else {
    float* out = result.mutable_data_ptr<float>();
    product.run(num_rows, [&](int64_t r, int64_t c, float value) { out[r * w.n + c] = value; });
  }
  return result;
}

at::Tensor linear_bfloat16(const at::Tensor& x, const at::Tensor& weight) {
  return plain_linear("linear_bfloat16", x, weight, std::nullopt, 1, true);
}

}  // namespace

at::Tensor linear_e4m3(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales) {
  return stored_linears("linear_e4m3", x, {stored_weight("linear_e4m3", codes, scales, false)})[0];
}

std::vector<at::Tensor> linears_e4m3(const char* op, const at::Tensor& x, const std::vector<StoredWeight>& weights) {
  return stored_linears(op, x, weights);
}

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scales,
                          int64_t groups) {
  return plain_linear("grouped_linear", x, weight, scales, groups, true);
}

at::Tensor matmul(const at::Tensor& x, const at::Tensor& weight) {
  return plain_linear("matmul", x, weight, std::nullopt, 1, false);
}

TORCH_LIBRARY_FRAGMENT(sgl_kernel_ext, m) {
  m.def("linear_e4m3(Tensor x, Tensor codes, Tensor scales) -> Tensor");
  m.def("linear_e2m1(Tensor x, Tensor packed, Tensor scales) -> Tensor");
  m.def("linear_bfloat16(Tensor x, Tensor weight) -> Tensor");
  m.def("matmul(Tensor x, Tensor weight) -> Tensor");
  m.def("grouped_linear(Tensor x, Tensor weight, Tensor? scales, int groups) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext, CPU, m) {
  m.impl("linear_e4m3", &linear_e4m3);
  m.impl("linear_e2m1", &linear_e2m1);
  m.impl("linear_bfloat16", &linear_bfloat16);
  m.impl("matmul", &matmul);
  m.impl("grouped_linear", &grouped_linear);
}

}  // namespace sgl_kernel_ext
