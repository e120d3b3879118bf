// Ops `attention_inputs` and `attention_output`: the projections around attention, each a chain of other ops.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>

#include "linear.h"
#include "rows.h"
#include "stored_input.h"

namespace sgl_kernel_ext {
namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_inputs(const at::Tensor& x, const at::Tensor& wq_a,
                                                                const at::Tensor& wq_a_scales, const at::Tensor& q_norm,
                                                                const at::Tensor& wq_b, const at::Tensor& wq_b_scales,
                                                                const at::Tensor& wkv, const at::Tensor& wkv_scales,
                                                                const at::Tensor& kv_norm, const at::Tensor& cos,
                                                                const at::Tensor& sin, double eps) {
  const char* op = "attention_inputs";
  const StoredWeight query = stored_weight(op, wq_a, wq_a_scales, false),
                     kv = stored_weight(op, wkv, wkv_scales, false);
  TORCH_CHECK_VALUE(x.dim() == 2 && kv.n > 0 && wq_b.dim() == 2 && wq_b.size(0) % kv.n == 0, op,
                    ": x must have 2 dimensions, and wq_b whole heads of ", kv.n, " rows, got shapes ", x.sizes(),
                    " and ", wq_b.sizes());
  const auto narrow = linears_e4m3(op, x, {query, kv});
  const at::Tensor q_lora = rms_norm(narrow[0], q_norm, eps);
  const at::Tensor heads = linear_e4m3(q_lora, wq_b, wq_b_scales).view({x.size(0), wq_b.size(0) / kv.n, kv.n});
  const at::Tensor key = rotate(rms_norm(narrow[1], kv_norm, eps), cos, sin, false);
  return {rotate(heads, cos, sin, false), q_lora, fake_quant_e4m3(key)};
}

at::Tensor attention_output(const at::Tensor& heads, const at::Tensor& cos, const at::Tensor& sin,
                            const at::Tensor& wo_a, const at::Tensor& wo_a_scales, int64_t groups,
                            const at::Tensor& wo_b, const at::Tensor& wo_b_scales) {
  const at::Tensor turned = rotate(heads, cos, sin, true);
  return linear_e4m3(grouped_linear(turned.flatten(1), wo_a, wo_a_scales, groups), wo_b, wo_b_scales);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_kernel_ext, m) {
  m.def(
      "attention_inputs(Tensor x, Tensor wq_a, Tensor wq_a_scales, Tensor q_norm, Tensor wq_b, Tensor wq_b_scales, "
      "Tensor wkv, Tensor wkv_scales, Tensor kv_norm, Tensor cos, Tensor sin, float eps) -> (Tensor q, Tensor q_lora, "
      "Tensor kv)");
  m.def(
      "attention_output(Tensor heads, Tensor cos, Tensor sin, Tensor wo_a, Tensor wo_a_scales, int groups, Tensor "
      "wo_b, Tensor wo_b_scales) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext, CPU, m) {
  m.impl("attention_inputs", &attention_inputs);
  m.impl("attention_output", &attention_output);
}

}  // namespace sgl_kernel_ext
