// Ops `mixes`, `collapse`, `enter` and `expand` of hyper-connections.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "checks.h"
#include "dispatch.h"
#include "linear.h"
#include "rows.h"

namespace sgl_kernel_ext {
namespace {

constexpr int64_t kMaxStreams = 8;
constexpr float kNormEps = 1e-20f;

float sigmoid(float x) { return static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(x)))); }

// comb [n][n]: row softmax, then columns and rows normalised in turn, ending on columns.
void sinkhorn(float* comb, int64_t n, int64_t iters, float eps) {
  for (int64_t j = 0; j < n; ++j) {
    float* row = comb + j * n;
    const double top = *std::max_element(row, row + n);
    double values[kMaxStreams], sum = 0.0;
    for (int64_t k = 0; k < n; ++k) sum += values[k] = std::exp(static_cast<double>(row[k]) - top);
    for (int64_t k = 0; k < n; ++k) row[k] = static_cast<float>(values[k] / sum) + eps;
  }
  const auto columns = [&] {
    for (int64_t k = 0; k < n; ++k) {
      float sum = comb[k];
      for (int64_t j = 1; j < n; ++j) sum += comb[j * n + k];
      for (int64_t j = 0; j < n; ++j) comb[j * n + k] /= sum + eps;
    }
  };
  columns();
  for (int64_t i = 1; i < iters; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      float sum = comb[j * n];
      for (int64_t k = 1; k < n; ++k) sum += comb[j * n + k];
      for (int64_t k = 0; k < n; ++k) comb[j * n + k] /= sum + eps;
    }
    columns();
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> mixes(const at::Tensor& streams, const at::Tensor& fn,
                                                     const at::Tensor& base, const at::Tensor& scale, int64_t iters,
                                                     double eps) {
  check("mixes", "streams", streams, at::kBFloat16, 3);
  const int64_t rows = streams.size(0), n = streams.size(1), d = streams.size(2), outputs = n * (n + 2);
  TORCH_CHECK_VALUE(1 <= n && n <= kMaxStreams, "mixes: 1 to ", kMaxStreams, " streams are served, got shape ",
                    streams.sizes(), " of ", streams.scalar_type());
  check_dtype("mixes", "fn", fn, at::kFloat);
  check_shape("mixes", "fn", fn, {outputs, n * d});
  check("mixes", "base", base, at::kFloat, 1);
  check_shape("mixes", "base", base, {outputs});
  check("mixes", "scale", scale, at::kFloat, 1);
  check_shape("mixes", "scale", scale, {3});
  const at::Tensor flat = streams.view({rows, n * d}), products = matmul(flat, fn);
  at::Tensor pre = at::empty({rows, n}, at::kFloat), post = at::empty({rows, n}, at::kFloat),
             comb = at::empty({rows, n, n}, at::kFloat);
  const float *m = products.const_data_ptr<float>(), *b = base.const_data_ptr<float>(),
              *factor = scale.const_data_ptr<float>();
  float *pre_out = pre.mutable_data_ptr<float>(), *post_out = post.mutable_data_ptr<float>(),
        *comb_out = comb.mutable_data_ptr<float>();
  const auto inverse_rms = SGL_KERNEL_EXT_CHOOSE(inverse_rms);
  const float small = static_cast<float>(eps);
  at::parallel_for(0, rows, rows_per_task(n * d), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float inverse = inverse_rms(row_of(flat, r * n * d), n * d, kNormEps);
      const auto logit = [&](int64_t i, int64_t kind) { return m[r * outputs + i] * inverse * factor[kind] + b[i]; };
      for (int64_t i = 0; i < n; ++i) {
        pre_out[r * n + i] = sigmoid(logit(i, 0)) + small;
        post_out[r * n + i] = 2.0f * sigmoid(logit(n + i, 1));
      }
      for (int64_t i = 0; i < n * n; ++i) comb_out[r * n * n + i] = logit(2 * n + i, 2);
      sinkhorn(comb_out + r * n * n, n, iters, small);
    }
  });
  return {pre, post, comb};
}

at::Tensor collapse(const at::Tensor& streams, const at::Tensor& weights) {
  check("collapse", "streams", streams, at::kBFloat16, 3);
  const int64_t rows = streams.size(0), n = streams.size(1), d = streams.size(2);
  check("collapse", "weights", weights, at::kFloat, 2);
  check_shape("collapse", "weights", weights, {rows, n});
  at::Tensor result = at::empty({rows, d}, streams.options());
  uint16_t* out = mutable_bfloat16_bits(result);
  const auto loop = SGL_KERNEL_EXT_CHOOSE(collapse);
  at::parallel_for(0, rows, rows_per_task(n * d), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      loop(bfloat16_bits(streams) + r * n * d, weights.const_data_ptr<float>() + r * n, n, d, out + r * d);
    }
  });
  return result;
}

at::Tensor expand(const at::Tensor& y, const at::Tensor& streams, const at::Tensor& post, const at::Tensor& comb) {
  check("expand", "streams", streams, at::kBFloat16, 3);
  const int64_t rows = streams.size(0), n = streams.size(1), d = streams.size(2);
  check("expand", "y", y, at::kBFloat16, 2);
  check_shape("expand", "y", y, {rows, d});
  check("expand", "post", post, at::kFloat, 2);
  check_shape("expand", "post", post, {rows, n});
  check("expand", "comb", comb, at::kFloat, 3);
  check_shape("expand", "comb", comb, {rows, n, n});
  at::Tensor result = at::empty({rows, n, d}, streams.options());
  uint16_t* out = mutable_bfloat16_bits(result);
  const auto loop = SGL_KERNEL_EXT_CHOOSE(expand);
  at::parallel_for(0, rows, rows_per_task(n * d), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      loop(bfloat16_bits(y) + r * d, bfloat16_bits(streams) + r * n * d, post.const_data_ptr<float>() + r * n,
           comb.const_data_ptr<float>() + r * n * n, n, d, out + r * n * d);
    }
  });
  return result;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> enter(const at::Tensor& streams, const at::Tensor& weights,
                                                                 const at::Tensor& norm, double norm_eps,
                                                                 const at::Tensor& fn, const at::Tensor& base,
                                                                 const at::Tensor& scale, int64_t iters, double eps) {
  auto [pre, post, comb] = mixes(streams, fn, base, scale, iters, eps);
  return {rms_norm(collapse(streams, weights), norm, norm_eps), pre, post, comb};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_kernel_ext, m) {
  m.def(
      "mixes(Tensor streams, Tensor fn, Tensor base, Tensor scale, int iters, float eps) -> (Tensor pre, Tensor post, "
      "Tensor comb)");
  m.def(
      "enter(Tensor streams, Tensor weights, Tensor norm, float norm_eps, Tensor fn, Tensor base, Tensor scale, int "
      "iters, float eps) -> (Tensor x, Tensor pre, Tensor post, Tensor comb)");
  m.def("collapse(Tensor streams, Tensor weights) -> Tensor");
  m.def("expand(Tensor y, Tensor streams, Tensor post, Tensor comb) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext, CPU, m) {
  m.impl("mixes", &mixes);
  m.impl("enter", &enter);
  m.impl("collapse", &collapse);
  m.impl("expand", &expand);
}

}  // namespace sgl_kernel_ext
