// Products that other ops are made of.
#pragma once

#include <ATen/core/Tensor.h>

namespace sgl_kernel_ext {

// The op `matmul`: x [..., K] by weight [N, K], bfloat16 or float32 -> float32 [..., N].
at::Tensor matmul(const at::Tensor& x, const at::Tensor& weight);

}  // namespace sgl_kernel_ext
