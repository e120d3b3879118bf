// The torch op library `sgl_kernel_ext`: checks, allocation, threads. The loops themselves know no torch.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <tuple>

#include "capability.h"
#include "dispatch.h"
#include "e4m3_block_loops.h"
#include "rows.h"

namespace sgl_kernel_ext {
namespace {

// A thread's share should outweigh waking it: 2048 blocks are 128 KiB of input, some ten microseconds.
constexpr int64_t kBlocksPerTask = 2048;

void check_blocks(const at::Tensor& x, const char* op) {
  TORCH_CHECK_TYPE(x.scalar_type() == at::kBFloat16, op, ": x must be bfloat16, got ", x.scalar_type(), " of shape ",
                   x.sizes());
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) % kBlock == 0, op, ": the last dimension of x must be a multiple of ",
                    kBlock, ", got shape ", x.sizes(), " of ", x.scalar_type());
  TORCH_CHECK_VALUE(x.is_contiguous(), op, ": x must be contiguous, got shape ", x.sizes(), " with strides ",
                    x.strides(), " of ", x.scalar_type());
}

const uint16_t* raw_bits(const at::Tensor& x) { return static_cast<const uint16_t*>(x.const_data_ptr()); }

std::tuple<at::Tensor, at::Tensor> quantize_e4m3(const at::Tensor& x) {
  check_blocks(x, "quantize_e4m3");
  auto scale_shape = x.sizes().vec();
  scale_shape.back() /= kBlock;
  at::Tensor codes = at::empty(x.sizes(), x.options().dtype(at::kByte));
  at::Tensor scales = at::empty(scale_shape, codes.options());
  const uint16_t* in = raw_bits(x);
  uint8_t* code = codes.mutable_data_ptr<uint8_t>();
  uint8_t* scale = scales.mutable_data_ptr<uint8_t>();
  const auto loop = SGL_KERNEL_EXT_CHOOSE(quantize_e4m3);
  at::parallel_for(0, x.numel() / kBlock, kBlocksPerTask, [&](int64_t begin, int64_t end) {
    loop(in + begin * kBlock, code + begin * kBlock, scale + begin, end - begin);
  });
  return {codes, scales};
}

}  // namespace

at::Tensor fake_quant_e4m3(const at::Tensor& x) {
  check_blocks(x, "fake_quant_e4m3");
  at::Tensor result = at::empty_like(x);
  const uint16_t* in = raw_bits(x);
  uint16_t* out = static_cast<uint16_t*>(result.mutable_data_ptr());
  const auto loop = SGL_KERNEL_EXT_CHOOSE(fake_quant_e4m3);
  at::parallel_for(0, x.numel() / kBlock, kBlocksPerTask,
                   [&](int64_t begin, int64_t end) { loop(in + begin * kBlock, out + begin * kBlock, end - begin); });
  return result;
}

TORCH_LIBRARY(sgl_kernel_ext, m) {
  m.def("fake_quant_e4m3(Tensor x) -> Tensor");
  m.def("quantize_e4m3(Tensor x) -> (Tensor codes, Tensor scales)");
  m.def("cpu_capability() -> str", &cpu_level_name);
  m.def("supported_cpu_capabilities() -> str[]", &supported_cpu_levels);
  m.def("force_cpu_capability(str level) -> ()", [](std::string level) { force_cpu_level(level); });
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext, CPU, m) {
  m.impl("fake_quant_e4m3", &fake_quant_e4m3);
  m.impl("quantize_e4m3", &quantize_e4m3);
}

}  // namespace sgl_kernel_ext
