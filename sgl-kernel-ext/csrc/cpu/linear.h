// Products that other ops are made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "stored_input.h"

namespace sgl_kernel_ext {

// The op `matmul`: x [..., K] by weight [N, K], bfloat16 or float32 -> float32 [..., N].
at::Tensor matmul(const at::Tensor& x, const at::Tensor& weight);

// The op `linear_e4m3`, and the same for some weights of one k at a time.
at::Tensor linear_e4m3(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales);
std::vector<at::Tensor> linears_e4m3(const char* op, const at::Tensor& x, const std::vector<StoredWeight>& weights);

// The op `grouped_linear`.
at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& scales,
                          int64_t groups);

}  // namespace sgl_kernel_ext
