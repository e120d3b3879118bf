// The op `route`, for the op that goes on with what it chooses.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace sgl_kernel_ext {

std::tuple<at::Tensor, at::Tensor> route(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                         int64_t top_k, double scale, double temperature);

}  // namespace sgl_kernel_ext
