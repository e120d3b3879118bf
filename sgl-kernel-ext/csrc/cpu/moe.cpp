// Ops `expert_mlp`, `mixture` and `feed_forward`: SwiGLU experts with stored weights, many experts at a time.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "checks.h"
#include "dispatch.h"
#include "route.h"
#include "stored_input.h"
#include "swiglu_loops.h"

namespace sgl_kernel_ext {
namespace {

constexpr int64_t kTokensAtOnce = 1024;
constexpr int64_t kWeightsPerTask = 131072;

struct Expert {
  StoredWeight gate, down, up;
};

// Up to StoredInput::kMaxRows pairs of a token and one expert, beside each other in the list of all pairs.
struct Part {
  const Expert* expert;
  int64_t first_pair, count;
};

// Pairs (token, expert, weight), grouped by expert.
struct Pairs {
  std::vector<int32_t> token;
  std::vector<float> weight;  // empty: all 1
  std::vector<Part> parts;

  void add_parts(const Expert* expert, int64_t first, int64_t end) {
    for (; first < end; first += StoredInput::kMaxRows) {
      parts.push_back({expert, first, std::min(StoredInput::kMaxRows, end - first)});
    }
  }
};

std::vector<Expert> experts_of(const char* op, at::TensorList codes, at::TensorList scales, bool is_e2m1, int64_t d) {
  TORCH_CHECK_VALUE(codes.size() == scales.size() && codes.size() % 3 == 0, op,
                    ": three codes and three scales are needed per expert, got ", codes.size(), " and ", scales.size());
  std::vector<Expert> experts;
  experts.reserve(codes.size() / 3);
  for (size_t i = 0; i < codes.size(); i += 3) {
    const Expert expert{stored_weight(op, codes[i], scales[i], is_e2m1),
                        stored_weight(op, codes[i + 1], scales[i + 1], is_e2m1),
                        stored_weight(op, codes[i + 2], scales[i + 2], is_e2m1)};
    const int64_t inner = experts.empty() ? expert.gate.n : experts[0].gate.n;
    TORCH_CHECK_VALUE(expert.gate.k == d && expert.up.k == d && expert.down.n == d && expert.gate.n == inner &&
                          expert.up.n == inner && expert.down.k == inner,
                      op, ": w1 and w3 must be [", inner, ", ", d, "] and w2 [", d, ", ", inner,
                      "], got codes of shapes ", codes[i].sizes(), ", ", codes[i + 2].sizes(), " and ",
                      codes[i + 1].sizes(), " of ", codes[i].scalar_type());
    experts.push_back(expert);
  }
  return experts;
}

// Rows that go through experts of one form: x, `num_tokens` rows of d, of which the pairs choose -> one row of d per
// pair, in `out`.
struct Batch {
  const uint16_t* x;
  int64_t num_tokens;
  Pairs pairs;
  uint16_t* out;
};

// What a batch has while it runs.
struct Running {
  const Batch* batch;
  int64_t d, inner;
  StoredInput input;
  at::Tensor middle_storage;
  uint16_t* middle;
  StoredInput middle_input;

  Running(const Batch& b, int64_t width, const Expert& first)
      : batch(&b),
        d(width),
        inner(first.gate.n),
        input(b.x, b.num_tokens, d, first.gate.is_e2m1),
        middle_storage(at::empty({static_cast<int64_t>(b.pairs.token.size()), inner}, at::kBFloat16)),
        middle(mutable_bfloat16_bits(middle_storage)),
        middle_input(middle, static_cast<int64_t>(b.pairs.token.size()), inner, first.gate.is_e2m1) {}

  // Columns [16 * tile, ...) of gate and up, joined. next: the part of the tile that will run next.
  void first_half(const Part& part, int64_t tile, const Part* next, float limit) const {
    const Pairs& pairs = batch->pairs;
    float gate[StoredInput::kMaxRows * kTile], up[StoredInput::kMaxRows * kTile];
    const int32_t* rows = pairs.token.data() + part.first_pair;
    const StoredWeight& following = (next == nullptr ? part : *next).expert->gate;
    input.tile(rows, part.count, part.expert->gate, tile, gate, tile_codes(part.expert->up, tile));
    const auto columns =
        input.tile(rows, part.count, part.expert->up, tile, up, tile_codes(following, next == &part ? tile + 1 : 0));
    const auto swiglu = SGL_KERNEL_EXT_CHOOSE(swiglu);
    for (int64_t r = 0; r < part.count; ++r) {
      const int64_t pair = part.first_pair + r;
      const float weight = pairs.weight.empty() ? 1.0f : pairs.weight[static_cast<size_t>(pair)];
      uint16_t values[kTile];
      swiglu(gate + r * kTile, up + r * kTile, kTile, limit, !pairs.weight.empty(), weight, values);
      std::copy_n(values + columns.offset, columns.count, middle + pair * inner + columns.first);
    }
  }

  void second_half(const Part& part, int64_t tile, const Part* next) const {
    float total[StoredInput::kMaxRows * kTile];
    int32_t rows[StoredInput::kMaxRows];
    for (int64_t r = 0; r < part.count; ++r) rows[r] = static_cast<int32_t>(part.first_pair + r);
    const uint8_t* following = next == nullptr || next == &part ? nullptr : tile_codes(next->expert->down, 0);
    const auto columns = middle_input.tile(rows, part.count, part.expert->down, tile, total, following);
    for (int64_t r = 0; r < part.count; ++r) {
      uint16_t* row = batch->out + rows[r] * d + columns.first;
      for (int64_t c = 0; c < columns.count; ++c) row[c] = to_bfloat16_bits(total[r * kTile + columns.offset + c]);
    }
  }
};

// Bytes that a tile of one part reads, for sharing out tiles; more rows make it dearer.
int64_t cost_of(const Part& part, int64_t k) {
  return kTile * k * (part.expert->gate.is_e2m1 ? 1 : 2) / 2 * (1 + part.count / 4);
}

// run(batch, part, tile, part of the next tile, if there is one) for all tiles of columns of all parts, shared out by
// cost. columns_of, inputs_of: of a batch.
template <typename ColumnsOf, typename InputsOf, typename Run>
void for_all_tiles(const std::vector<Running>& batches, const ColumnsOf& columns_of, const InputsOf& inputs_of,
                   const Run& run) {
  struct Work {
    const Running* batch;
    const Part* part;
    int64_t tiles, cost;
  };
  std::vector<Work> work;
  int64_t total = 0;
  for (const Running& batch : batches) {
    for (const Part& part : batch.batch->pairs.parts) {
      work.push_back({&batch, &part, num_tiles(columns_of(batch)), cost_of(part, inputs_of(batch))});
      total += work.back().tiles * work.back().cost;
    }
  }
  const int64_t tasks = std::clamp<int64_t>(total / (kWeightsPerTask / 2), 1, at::get_num_threads());
  at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    const int64_t from = total / tasks * begin, to = end == tasks ? total : total / tasks * end;
    int64_t at = 0;
    for (size_t i = 0; i < work.size(); ++i) {
      const Part* following = i + 1 < work.size() ? work[i + 1].part : nullptr;
      for (int64_t tile = 0; tile < work[i].tiles; ++tile, at += work[i].cost) {
        if (from <= at && at < to) {
          run(*work[i].batch, *work[i].part, tile, tile + 1 < work[i].tiles ? work[i].part : following);
        }
      }
    }
  });
}

// All batches side by side.
void run_experts(const std::vector<Batch>& batches, int64_t d, float limit) {
  std::vector<Running> running;
  running.reserve(batches.size());
  for (const Batch& batch : batches) {
    if (!batch.pairs.token.empty()) {
      running.emplace_back(batch, d, *batch.pairs.parts[0].expert);
      running.back().input.pack_all();
    }
  }
  const auto outer = [](const Running& batch) { return batch.d; };
  const auto inner = [](const Running& batch) { return batch.inner; };
  for_all_tiles(running, inner, outer, [&](const Running& batch, const Part& part, int64_t tile, const Part* next) {
    batch.first_half(part, tile, next, limit);
  });
  for (Running& batch : running) batch.middle_input.pack_all();
  for_all_tiles(running, outer, inner, [](const Running& batch, const Part& part, int64_t tile, const Part* next) {
    batch.second_half(part, tile, next);
  });
}

// Every row by one expert.
Pairs all_by(const Expert& expert, int64_t num_tokens, const float* weights) {
  Pairs pairs;
  for (int64_t row = 0; row < num_tokens; ++row) pairs.token.push_back(static_cast<int32_t>(row));
  if (weights != nullptr) {
    pairs.weight.assign(weights, weights + num_tokens);
  }
  pairs.add_parts(&expert, 0, num_tokens);
  return pairs;
}

int64_t check_x(const char* op, const at::Tensor& x) {
  check(op, "x", x, at::kBFloat16, 2);
  return x.size(1);
}

at::Tensor expert_mlp(const at::Tensor& x, at::TensorList codes, at::TensorList scales, bool is_e2m1, double limit,
                      const std::optional<at::Tensor>& row_weight) {
  const int64_t d = check_x("expert_mlp", x), num_rows = x.size(0);
  const auto experts = experts_of("expert_mlp", codes, scales, is_e2m1, d);
  TORCH_CHECK_VALUE(experts.size() == 1, "expert_mlp: one expert is needed, got ", experts.size());
  const float* weights = nullptr;
  if (row_weight.has_value()) {
    check("expert_mlp", "row_weight", *row_weight, at::kFloat, 1);
    check_shape("expert_mlp", "row_weight", *row_weight, {num_rows});
    weights = row_weight->const_data_ptr<float>();
  }
  at::Tensor result = at::empty_like(x);
  for (int64_t first = 0; first < num_rows; first += kTokensAtOnce) {
    const int64_t count = std::min(kTokensAtOnce, num_rows - first);
    std::vector<Batch> batches;
    batches.push_back({bfloat16_bits(x) + first * d, count,
                       all_by(experts[0], count, weights == nullptr ? nullptr : weights + first),
                       mutable_bfloat16_bits(result) + first * d});
    run_experts(batches, d, static_cast<float>(limit));
  }
  return result;
}

// The pairs of some tokens, by ascending expert; and for each token its pairs, in that order: places [tokens][top_k].
Pairs make_pairs(const int64_t* chosen, const float* weights, int64_t num_tokens, int64_t top_k,
                 const std::vector<Expert>& experts, std::vector<int32_t>& places) {
  std::vector<std::vector<int32_t>> by_expert(experts.size());
  for (int64_t i = 0; i < num_tokens * top_k; ++i) {
    TORCH_CHECK_INDEX(0 <= chosen[i] && chosen[i] < static_cast<int64_t>(experts.size()), "mixture: expert ", chosen[i],
                      " is not among the ", experts.size(), " given");
    by_expert[static_cast<size_t>(chosen[i])].push_back(static_cast<int32_t>(i));
  }
  Pairs pairs;
  std::vector<int64_t> seen(static_cast<size_t>(num_tokens), 0);
  places.resize(static_cast<size_t>(num_tokens * top_k));
  for (size_t e = 0; e < experts.size(); ++e) {
    const int64_t first = static_cast<int64_t>(pairs.token.size());
    for (const int32_t i : by_expert[e]) {
      const int64_t token = i / top_k;
      places[static_cast<size_t>(token * top_k + seen[static_cast<size_t>(token)]++)] =
          static_cast<int32_t>(pairs.token.size());
      pairs.token.push_back(static_cast<int32_t>(token));
      pairs.weight.push_back(weights[i]);
    }
    pairs.add_parts(&experts[e], first, static_cast<int64_t>(pairs.token.size()));
  }
  return pairs;
}

// The experts of a layer, checked once. Holds the tensors whose bytes it points to.
struct Experts : torch::CustomClassHolder {
  std::vector<at::Tensor> held;
  std::vector<Expert> routed, shared;

  Experts(const std::vector<at::Tensor>& codes, const std::vector<at::Tensor>& scales, bool is_e2m1,
          const std::vector<at::Tensor>& shared_codes, const std::vector<at::Tensor>& shared_scales,
          bool shared_is_e2m1) {
    for (const auto* each : {&codes, &scales, &shared_codes, &shared_scales}) {
      held.insert(held.end(), each->begin(), each->end());
    }
    TORCH_CHECK_VALUE(codes.size() >= 3 && shared_codes.size() == 3 && shared_codes[1].dim() == 2,
                      "Experts: some experts and one shared one are needed, three codes each, got ", codes.size(),
                      " and ", shared_codes.size());
    const int64_t d = shared_codes[1].size(0);
    routed = experts_of("Experts", codes, scales, is_e2m1, d);
    shared = experts_of("Experts", shared_codes, shared_scales, shared_is_e2m1, d);
  }
};

at::Tensor mixture(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& weights,
                   const c10::intrusive_ptr<Experts>& experts, double limit) {
  const int64_t d = check_x("mixture", x), num_tokens = x.size(0);
  TORCH_CHECK_VALUE(experts->shared[0].gate.k == d, "mixture: x must have ", experts->shared[0].gate.k,
                    " columns, got shape ", x.sizes(), " of ", x.scalar_type());
  check("mixture", "chosen", chosen, at::kLong, 2);
  const int64_t top_k = chosen.size(1);
  check_shape("mixture", "chosen", chosen, {num_tokens, top_k});
  check("mixture", "weights", weights, at::kFloat, 2);
  check_shape("mixture", "weights", weights, {num_tokens, top_k});
  at::Tensor result = at::empty_like(x);
  const int64_t at_once = std::min(kTokensAtOnce, num_tokens);
  at::Tensor routed = at::empty({at_once * top_k, d}, x.options()), common = at::empty({at_once, d}, x.options());
  const uint16_t* routed_bits = bfloat16_bits(routed);
  const uint16_t* common_bits = bfloat16_bits(common);
  for (int64_t first = 0; first < num_tokens; first += at_once) {
    const int64_t count = std::min(at_once, num_tokens - first);
    const uint16_t* rows = bfloat16_bits(x) + first * d;
    std::vector<int32_t> places;
    std::vector<Batch> batches;
    batches.push_back(
        {rows, count,
         make_pairs(chosen.const_data_ptr<int64_t>() + first * top_k, weights.const_data_ptr<float>() + first * top_k,
                    count, top_k, experts->routed, places),
         mutable_bfloat16_bits(routed)});
    batches.push_back({rows, count, all_by(experts->shared[0], count, nullptr), mutable_bfloat16_bits(common)});
    run_experts(batches, d, static_cast<float>(limit));
    uint16_t* out = mutable_bfloat16_bits(result) + first * d;
    at::parallel_for(0, count, std::max<int64_t>(1, kWeightsPerTask / std::max<int64_t>(1, d * (top_k + 1))),
                     [&](int64_t begin, int64_t end) {
                       for (int64_t token = begin; token < end; ++token) {
                         for (int64_t c = 0; c < d; ++c) {
                           float sum = 0.0f;
                           for (int64_t i = 0; i < top_k; ++i) {
                             const int64_t pair = places[static_cast<size_t>(token * top_k + i)];
                             sum += from_bfloat16_bits(routed_bits[pair * d + c]);
                           }
                           out[token * d + c] = to_bfloat16_bits(sum + from_bfloat16_bits(common_bits[token * d + c]));
                         }
                       }
                     });
  }
  return result;
}

at::Tensor feed_forward(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& bias, int64_t top_k,
                        double scale, double temperature, const c10::intrusive_ptr<Experts>& experts, double limit) {
  const auto [chosen, weights] = route(x, gate, bias, top_k, scale, temperature);
  return mixture(x, chosen, weights, experts, limit);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_kernel_ext, m) {
  m.def(
      "expert_mlp(Tensor x, Tensor[] codes, Tensor[] scales, bool is_e2m1, float limit, Tensor? row_weight) -> Tensor");
  using Tensors = std::vector<at::Tensor>;
  m.class_<Experts>("Experts").def(torch::init<Tensors, Tensors, bool, Tensors, Tensors, bool>());
  m.def(
      "mixture(Tensor x, Tensor chosen, Tensor weights, __torch__.torch.classes.sgl_kernel_ext.Experts experts, float "
      "limit) -> Tensor");
  m.def(
      "feed_forward(Tensor x, Tensor gate, Tensor bias, int top_k, float scale, float temperature, "
      "__torch__.torch.classes.sgl_kernel_ext.Experts experts, float limit) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext, CPU, m) {
  m.impl("expert_mlp", &expert_mlp);
  m.impl("mixture", &mixture);
  m.impl("feed_forward", &feed_forward);
}

}  // namespace sgl_kernel_ext
