// Ops `join_keys` and `attend`: one softmax over window rows and global records.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "attention_loops.h"
#include "checks.h"
#include "dispatch.h"

namespace sgl_kernel_ext {

int64_t attend_scratch(int64_t heads, int64_t dim) { return 2 * heads * dim + 64 * (dim + 8) + heads * (64 + 3); }

namespace {

constexpr int64_t kFewestHeads = 4;  // of one task: each task decodes the keys anew

KeySource key_source(const at::Tensor& window, const std::optional<at::Tensor>& pool, int64_t dim) {
  check("attend", "window", window, at::kBFloat16, 2);
  TORCH_CHECK_VALUE(dim % 16 == 0 && window.size(1) == dim,
                    "attend: q and window must have one last dimension, a "
                    "multiple of 16, got ",
                    dim, " and window of shape ", window.sizes(), " of ", window.scalar_type());
  KeySource source{bfloat16_bits(window), window.size(0), nullptr, dim, false};
  if (pool.has_value()) {
    check("attend", "pool", *pool, at::kByte, 2);
    source.pool_is_bfloat16 = holds_bfloat16("attend", "pool", *pool, source.record_bytes(), dim);
    source.pool = bytes(*pool);
  }
  return source;
}

at::Tensor join_keys(const at::Tensor& window, const at::Tensor& groups, int64_t num_window_rows) {
  check("join_keys", "window", window, at::kLong, 2);
  check("join_keys", "groups", groups, at::kLong, 2);
  const int64_t rows = window.size(0), width = window.size(1), k = groups.size(1);
  check_shape("join_keys", "groups", groups, {rows, k});
  at::Tensor result = at::empty({rows, width + k}, window.options());
  int64_t* out = result.mutable_data_ptr<int64_t>();
  for (int64_t r = 0; r < rows; ++r, out += width + k) {
    const int64_t *key = window.const_data_ptr<int64_t>() + r * width, *slot = groups.const_data_ptr<int64_t>() + r * k;
    int64_t found = 0;
    for (int64_t i = 0; i < width; ++i) {
      if (key[i] >= 0) {
        out[found++] = key[i];
      }
    }
    for (int64_t i = 0; i < k; ++i) {
      if (slot[i] >= 0) {
        out[found++] = slot[i] + num_window_rows;
      }
    }
    std::fill(out + found, out + width + k, -1);
  }
  return result;
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& window, const std::optional<at::Tensor>& pool,
                  const at::Tensor& keys, const at::Tensor& sink) {
  check("attend", "q", q, at::kBFloat16, 3);
  const int64_t num_rows = q.size(0), heads = q.size(1), dim = q.size(2);
  const KeySource source = key_source(window, pool, dim);
  check("attend", "keys", keys, at::kLong, 2);
  const int64_t num_keys = keys.size(1);
  check_shape("attend", "keys", keys, {num_rows, num_keys});
  check("attend", "sink", sink, at::kFloat, 1);
  check_shape("attend", "sink", sink, {heads});
  const int64_t* key = keys.const_data_ptr<int64_t>();
  const int64_t limit = source.num_window + (pool.has_value() ? pool->size(0) : 0);
  const auto largest = std::max_element(key, key + keys.numel());
  TORCH_CHECK_INDEX(keys.numel() == 0 || *largest < limit, "attend: key entry ", keys.numel() == 0 ? 0 : *largest,
                    " is beyond the ", limit, " window rows and pool slots there are");

  at::Tensor result = at::empty_like(q);
  const int64_t threads = at::get_num_threads();
  const int64_t parts =
      std::clamp<int64_t>(threads / std::max<int64_t>(1, num_rows), 1, std::max<int64_t>(1, heads / kFewestHeads));
  const int64_t size = (heads + parts - 1) / parts;
  const auto loop = SGL_KERNEL_EXT_CHOOSE(attend_row);
  uint16_t* out = mutable_bfloat16_bits(result);
  at::parallel_for(0, num_rows * parts, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<double[]> scratch(new double[static_cast<size_t>(attend_scratch(size, dim))]);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / parts, head = task % parts * size, count = std::min(size, heads - head);
      if (count > 0) {
        const int64_t start = (row * heads + head) * dim;
        loop(bfloat16_bits(q) + start, count, source, key + row * num_keys, num_keys,
             sink.const_data_ptr<float>() + head, scratch.get(), out + start);
      }
    }
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_kernel_ext, m) {
  m.def("join_keys(Tensor window, Tensor groups, int num_window_rows) -> Tensor");
  m.def("attend(Tensor q, Tensor window, Tensor? pool, Tensor keys, Tensor sink) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext, CPU, m) {
  m.impl("join_keys", &join_keys);
  m.impl("attend", &attend);
}

}  // namespace sgl_kernel_ext
