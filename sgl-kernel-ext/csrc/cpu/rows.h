// What the ops over single rows share.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "checks.h"
#include "row_loops.h"

namespace sgl_kernel_ext {

// A thread's share should outweigh waking it.
inline int64_t rows_per_task(int64_t values_per_row) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, values_per_row));
}

inline Row row_of(const at::Tensor& x, int64_t offset) {
  const bool is_float = x.scalar_type() == at::kFloat;
  return {static_cast<const char*>(x.const_data_ptr()) + offset * (is_float ? 4 : 2), is_float};
}

inline void check_float_or_bfloat16(const char* op, const char* name, const at::Tensor& x) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, op, ": ", name,
                   " must be float32 or bfloat16, got ", x.scalar_type(), " of shape ", x.sizes());
  check_contiguous(op, name, x);
}

// The ops of these names.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);
at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, bool inverse);
at::Tensor fake_quant_e4m3(const at::Tensor& x);

}  // namespace sgl_kernel_ext
