// Op `route`: which experts a token goes to, and with what weight.

#include "route.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "checks.h"
#include "linear.h"

namespace sgl_kernel_ext {
namespace {

// sqrt(softplus(x)), as torch forms it.
float score(float logit) {
  const double x = logit;
  return static_cast<float>(std::sqrt(x > 20.0 ? x : std::log1p(std::exp(x))));
}

// A stable descending sort puts NaN first.
bool comes_before(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

}  // namespace

std::tuple<at::Tensor, at::Tensor> route(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                         int64_t top_k, double scale, double temperature) {
  check("route", "x", x, at::kBFloat16, 2);
  check("route", "bias", bias, at::kFloat, 1);
  const int64_t num_experts = bias.size(0), num_rows = x.size(0);
  check_shape("route", "weight", weight, {num_experts, x.size(1)});
  TORCH_CHECK_VALUE(0 < top_k && top_k <= num_experts, "route: top_k must be 1 to ", num_experts, ", got ", top_k);
  const at::Tensor logits = matmul(x, weight);
  at::Tensor chosen = at::empty({num_rows, top_k}, at::kLong), weights = at::empty({num_rows, top_k}, at::kFloat);
  const float* logit = logits.const_data_ptr<float>();
  const float* added = bias.const_data_ptr<float>();
  int64_t* ids = chosen.mutable_data_ptr<int64_t>();
  float* out = weights.mutable_data_ptr<float>();
  at::parallel_for(0, num_rows, std::max<int64_t>(1, 2048 / num_experts), [&](int64_t begin, int64_t end) {
    std::vector<float> scores(static_cast<size_t>(num_experts));
    for (int64_t row = begin; row < end; ++row) {
      int64_t* best = ids + row * top_k;
      int64_t found = 0;
      for (int64_t e = 0; e < num_experts; ++e) {
        scores[static_cast<size_t>(e)] = score(logit[row * num_experts + e] / static_cast<float>(temperature));
        const float biased = scores[static_cast<size_t>(e)] + added[e];
        int64_t place = found;
        for (; place > 0; --place) {
          const int64_t other = best[place - 1];
          if (!comes_before(biased, scores[static_cast<size_t>(other)] + added[other])) {
            break;
          }
          if (place < top_k) {
            best[place] = other;
          }
        }
        if (place < top_k) {
          best[place] = e;
          found = std::min(found + 1, top_k);
        }
      }
      float sum = scores[static_cast<size_t>(best[0])];
      for (int64_t i = 1; i < top_k; ++i) sum += scores[static_cast<size_t>(best[i])];
      for (int64_t i = 0; i < top_k; ++i) {
        out[row * top_k + i] =
            scores[static_cast<size_t>(best[i])] / (sum + static_cast<float>(1e-20)) * static_cast<float>(scale);
      }
    }
  });
  return {chosen, weights};
}

TORCH_LIBRARY_FRAGMENT(sgl_kernel_ext, m) {
  m.def(
      "route(Tensor x, Tensor weight, Tensor bias, int top_k, float scale, float temperature) -> (Tensor chosen, "
      "Tensor "
      "weights)");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext, CPU, m) { m.impl("route", &route); }

}  // namespace sgl_kernel_ext
