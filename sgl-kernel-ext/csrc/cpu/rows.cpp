// Ops `rms_norm` and `rotate`.

#include "rows.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>

#include "checks.h"
#include "dispatch.h"

namespace sgl_kernel_ext {

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  check_float_or_bfloat16("rms_norm", "x", x);
  check_float_or_bfloat16("rms_norm", "weight", weight);
  TORCH_CHECK_VALUE(x.dim() >= 1, "rms_norm: x must have a dimension, got shape ", x.sizes(), " of ", x.scalar_type());
  const int64_t d = x.size(-1);
  check_shape("rms_norm", "weight", weight, {d});
  at::Tensor result = at::empty(x.sizes(), x.options().dtype(at::kBFloat16));
  uint16_t* out = mutable_bfloat16_bits(result);
  const auto loop = SGL_KERNEL_EXT_CHOOSE(rms_norm);
  at::parallel_for(0, d == 0 ? 0 : x.numel() / d, rows_per_task(d), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      loop(row_of(x, r * d), row_of(weight, 0), d, static_cast<float>(eps), out + r * d);
    }
  });
  return result;
}

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool inverse) {
  check_dtype("rotate", "x", x, at::kBFloat16);
  check_contiguous("rotate", "x", x);
  check("rotate", "cos", cos, at::kFloat, 2);
  check("rotate", "sin", sin, at::kFloat, 2);
  const int64_t pairs = cos.size(1);
  check_shape("rotate", "sin", sin, cos.sizes());
  TORCH_CHECK_VALUE(x.dim() >= 2 && x.size(0) == cos.size(0) && x.size(-1) >= 2 * pairs, "rotate: x must be [",
                    cos.size(0), ", ..., ", 2 * pairs, " or more], got shape ", x.sizes(), " of ", x.scalar_type());
  at::Tensor result = at::empty_like(x);
  const int64_t d = x.size(-1), rows = x.numel() / std::max<int64_t>(1, d);
  const int64_t rows_of_one = rows / std::max<int64_t>(1, x.size(0)), kept = d - 2 * pairs;
  const uint16_t* in = bfloat16_bits(x);
  uint16_t* out = mutable_bfloat16_bits(result);
  const auto loop = SGL_KERNEL_EXT_CHOOSE(rotate);
  at::parallel_for(0, rows, rows_per_task(d), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t table = r / rows_of_one * pairs;
      std::copy_n(in + r * d, kept, out + r * d);
      loop(in + r * d + kept, cos.const_data_ptr<float>() + table, sin.const_data_ptr<float>() + table, inverse, pairs,
           out + r * d + kept);
    }
  });
  return result;
}

TORCH_LIBRARY_FRAGMENT(sgl_kernel_ext, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("rotate(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext, CPU, m) {
  m.impl("rms_norm", &rms_norm);
  m.impl("rotate", &rotate);
}

}  // namespace sgl_kernel_ext
