// Ops `index_scores`, `index_scores_at`, `top_groups` and `candidate_groups`.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "checks.h"
#include "dispatch.h"
#include "indexer_loops.h"
#include "rows.h"

namespace sgl_kernel_ext {
namespace {

constexpr int64_t kKeysPerTask = 256;
constexpr uint16_t kMinusInfinity = 0xff80;

// The rows of one call, in the form that each is scored in.
class Scorer {
 public:
  Scorer(const char* op, const at::Tensor& q, const at::Tensor& weights, const at::Tensor& pool)
      : level_(cpu_level()), rows(q.size(0)), heads_(q.size(1)), dim_(q.size(2)) {
    TORCH_CHECK_VALUE(dim_ % 32 == 0, op, ": the last dimension of q must be a multiple of 32, got shape ", q.sizes(),
                      " of ", q.scalar_type());
    check(op, "weights", weights, at::kBFloat16, 2);
    check_shape(op, "weights", weights, {rows, heads_});
    const int64_t packed = dim_ / 2 + dim_ / 32;
    as_bfloat16_ = holds_bfloat16(op, "keys", pool, packed, dim_);
    record_ = as_bfloat16_ ? 2 * dim_ : packed;
    pool_ = bytes(pool);
    weights_ = bfloat16_bits(weights);
    wide_ = at::empty(q.sizes(), q.options().dtype(at::kDouble));
    SGL_KERNEL_EXT_CHOOSE_AT(level_, widen)(bfloat16_bits(q), q.numel(), wide_.mutable_data_ptr<double>());
    packed_.resize(static_cast<size_t>(as_bfloat16_ ? 0 : rows * heads_));
    in_integers_.assign(static_cast<size_t>(rows), !as_bfloat16_);
    const auto pack = SGL_KERNEL_EXT_CHOOSE_AT(level_, pack_query);
    for (size_t i = 0; i < packed_.size(); ++i) {
      const size_t row = i / static_cast<size_t>(heads_);
      const float weight = from_bfloat16_bits(weights_[i]);
      in_integers_[row] =
          in_integers_[row] && pack(bfloat16_bits(q) + static_cast<int64_t>(i) * dim_, dim_, weight, &packed_[i]);
    }
  }

  const uint8_t* key(int64_t slot) const { return pool_ + slot * record_; }

  // Rows [first, last) by the keys at `slots` (or, if null, from `first_slot` on), at most kKeysAtOnce -> out + row *
  // stride. A slot of -1 scores -inf.
  void score(int64_t first, int64_t last, const int64_t* slots, int64_t first_slot, int64_t count, uint16_t* out,
             int64_t stride) const {
    const uint8_t* records[kKeysAtOnce];
    bool hidden[kKeysAtOnce] = {};
    for (int64_t i = 0; i < kKeysAtOnce; ++i) {
      const int64_t place = std::min(i, count - 1), slot = slots == nullptr ? first_slot + place : slots[place];
      hidden[i] = slot < 0;
      records[i] = key(std::max<int64_t>(slot, 0));
    }
    at::Tensor decoded;
    for (int64_t row = first; row < last; ++row, out += stride) {
      uint16_t scores[kKeysAtOnce];
      if (!in_integers_[static_cast<size_t>(row)] ||
          !SGL_KERNEL_EXT_CHOOSE_AT(level_, score_packed)(packed_.data() + row * heads_, heads_, records, dim_,
                                                          scores)) {
        if (!decoded.defined()) {
          decoded = at::empty({kKeysAtOnce * (dim_ + heads_)}, at::kDouble);
          SGL_KERNEL_EXT_CHOOSE_AT(level_, decode_keys)
          (records, as_bfloat16_, count, dim_, decoded.mutable_data_ptr<double>());
        }
        double* keys = decoded.mutable_data_ptr<double>();
        SGL_KERNEL_EXT_CHOOSE_AT(level_, score_keys)
        (wide_.const_data_ptr<double>() + row * heads_ * dim_, weights_ + row * heads_, heads_, keys, count, dim_,
         keys + kKeysAtOnce * dim_, scores);
      }
      for (int64_t i = 0; i < count; ++i) out[i] = hidden[i] ? kMinusInfinity : scores[i];
    }
  }

 private:
  CpuLevel level_;

 public:
  const int64_t rows;

 private:
  int64_t heads_, dim_, record_ = 0;
  bool as_bfloat16_ = false;
  const uint8_t* pool_ = nullptr;
  const uint16_t* weights_ = nullptr;
  at::Tensor wide_;
  std::vector<PackedQuery> packed_;
  std::vector<char> in_integers_;
};

int64_t blocks_of(int64_t keys) { return (keys + kKeysAtOnce - 1) / kKeysAtOnce; }

// The same keys for all rows: those at `slots`, or if that is null the first `count`.
at::Tensor score_shared(const Scorer& scorer, const at::Tensor& q, const int64_t* slots, int64_t count) {
  at::Tensor result = at::empty({scorer.rows, count}, q.options());
  uint16_t* out = mutable_bfloat16_bits(result);
  at::parallel_for(0, blocks_of(count), kKeysPerTask / kKeysAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kKeysAtOnce, size = std::min(kKeysAtOnce, count - first);
      scorer.score(0, scorer.rows, slots == nullptr ? nullptr : slots + first, first, size, out + first, count);
    }
  });
  return result;
}

at::Tensor index_scores(const at::Tensor& q, const at::Tensor& weights, const at::Tensor& keys) {
  check("index_scores", "q", q, at::kBFloat16, 3);
  check("index_scores", "keys", keys, at::kByte, 2);
  return score_shared(Scorer("index_scores", q, weights, keys), q, nullptr, keys.size(0));
}

at::Tensor index_scores_at(const at::Tensor& q, const at::Tensor& weights, const at::Tensor& keys,
                           const at::Tensor& slots) {
  constexpr const char* kOp = "index_scores_at";
  check(kOp, "q", q, at::kBFloat16, 3);
  check(kOp, "keys", keys, at::kByte, 2);
  check_dtype(kOp, "slots", slots, at::kLong);
  check_contiguous(kOp, "slots", slots);
  const bool shared = slots.dim() == 1;
  const int64_t rows = q.size(0), count = slots.dim() == 0 ? 0 : slots.size(-1);
  TORCH_CHECK_VALUE(shared || (slots.dim() == 2 && slots.size(0) == rows), kOp, ": slots must be [G] or [", rows,
                    ", G], got shape ", slots.sizes(), " of ", slots.scalar_type());
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  if (slots.numel() != 0) {
    const int64_t largest = *std::max_element(slot, slot + slots.numel());
    TORCH_CHECK_INDEX(largest < keys.size(0), kOp, ": slot ", largest, " is not in the pool of ", keys.size(0));
  }
  const Scorer scorer(kOp, q, weights, keys);
  if (keys.size(0) == 0 || count == 0) {
    return at::full({rows, count}, -std::numeric_limits<double>::infinity(), q.options());
  }
  if (shared) {
    return score_shared(scorer, q, slot, count);
  }
  at::Tensor result = at::empty({rows, count}, q.options());
  uint16_t* out = mutable_bfloat16_bits(result);
  const int64_t blocks = blocks_of(count);
  at::parallel_for(0, rows * blocks, kKeysPerTask / kKeysAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / blocks, first = task % blocks * kKeysAtOnce, at = row * count + first;
      scorer.score(row, row + 1, slot + at, 0, std::min(kKeysAtOnce, count - first), out + at, 0);
    }
  });
  return result;
}

// -- selection --------------------------------------------------------------------------------------------------------

constexpr uint32_t kHidden = 0x007f;  // where -inf lands below

// bfloat16 bits -> integers in the order of the values: NaN counts as -inf, and both zeros are one.
uint16_t rank_of(uint16_t bits) {
  if ((bits & 0x7fffu) > 0x7f80u) {
    return kHidden;
  }
  if (bits == 0x8000u) {
    bits = 0;
  }
  return static_cast<uint16_t>((bits & 0x8000u) != 0 ? ~bits : bits | 0x8000u);
}

struct Cut {
  uint32_t rank;     // what ranks above is chosen ...
  int64_t of_equal;  // ... and this many of those that rank equal, lowest index first
};

// Two counting passes, over the high and the low byte.
Cut find_cut(const std::vector<uint16_t>& ranks, int64_t k) {
  std::array<int64_t, 256> counts{};
  for (const uint16_t rank : ranks) ++counts[rank >> 8];
  const auto descend = [&](int64_t left) {
    int64_t bin = 255;
    for (; bin > 0 && counts[static_cast<size_t>(bin)] < left; --bin) left -= counts[static_cast<size_t>(bin)];
    return std::array<int64_t, 2>{bin, left};
  };
  const auto [high, left] = descend(k);
  counts.fill(0);
  for (const uint16_t rank : ranks) {
    if (rank >> 8 == high) {
      ++counts[rank & 255];
    }
  }
  const auto [low, equal] = descend(left);
  const Cut cut{static_cast<uint32_t>(high << 8 | low), equal};
  return cut.rank > kHidden ? cut : Cut{kHidden, 0};
}

// take(index) for each of the k best that are not hidden, in ascending order of index.
template <typename Take>
void for_best(const std::vector<uint16_t>& ranks, int64_t k, const Take& take) {
  if (k == 0) {
    return;
  }
  Cut cut = find_cut(ranks, std::min<int64_t>(k, static_cast<int64_t>(ranks.size())));
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] > cut.rank || (ranks[i] == cut.rank && cut.of_equal-- > 0)) {
      take(static_cast<int64_t>(i));
    }
  }
}

at::Tensor top_groups(const at::Tensor& scores, int64_t k) {
  check("top_groups", "scores", scores, at::kBFloat16, 2);
  TORCH_CHECK_VALUE(k >= 0, "top_groups: k must not be negative, got ", k);
  const int64_t rows = scores.size(0), groups = scores.size(1), width = std::min(k, groups);
  at::Tensor result = at::empty({rows, width}, scores.options().dtype(at::kLong));
  int64_t* out = result.mutable_data_ptr<int64_t>();
  at::parallel_for(0, rows, rows_per_task(groups), [&](int64_t begin, int64_t end) {
    std::vector<uint16_t> ranks(static_cast<size_t>(groups));
    for (int64_t r = begin; r < end; ++r) {
      const uint16_t* row = bfloat16_bits(scores) + r * groups;
      std::transform(row, row + groups, ranks.begin(), rank_of);
      int64_t *next = out + r * width, *last = next + width;
      for_best(ranks, width, [&](int64_t i) { *next++ = i; });
      std::fill(next, last, -1);
    }
  });
  return result;
}

at::Tensor candidate_groups(const at::Tensor& scores, const at::Tensor& visible, int64_t blocks, int64_t block_size) {
  check("candidate_groups", "scores", scores, at::kBFloat16, 2);
  const int64_t rows = scores.size(0), groups = scores.size(1);
  check("candidate_groups", "visible", visible, at::kLong, 1);
  check_shape("candidate_groups", "visible", visible, {rows});
  TORCH_CHECK_VALUE(blocks >= 0 && block_size > 0, "candidate_groups: bad sizes ", blocks, " and ", block_size);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t seen = visible.const_data_ptr<int64_t>()[r];
    TORCH_CHECK_INDEX(seen <= groups, "candidate_groups: row ", r, " sees ", seen, " groups of ", groups);
  }
  const int64_t num_blocks = (groups + block_size - 1) / block_size;
  at::Tensor result = at::empty({rows, groups}, scores.options().dtype(at::kBool));
  bool* out = result.mutable_data_ptr<bool>();
  at::parallel_for(0, rows, rows_per_task(groups), [&](int64_t begin, int64_t end) {
    std::vector<uint16_t> best(static_cast<size_t>(num_blocks));
    for (int64_t r = begin; r < end; ++r) {
      const uint16_t* row = bfloat16_bits(scores) + r * groups;
      for (int64_t b = 0; b < num_blocks; ++b) {
        uint16_t top = kHidden;
        bool nan = false;  // hides its whole block, as a maximum would be NaN
        for (int64_t i = b * block_size; i < std::min(groups, (b + 1) * block_size); ++i) {
          nan |= (row[i] & 0x7fffu) > 0x7f80u;
          top = std::max(top, rank_of(row[i]));
        }
        best[static_cast<size_t>(b)] = nan ? static_cast<uint16_t>(kHidden) : top;
      }
      const int64_t seen = visible.const_data_ptr<int64_t>()[r];
      if (seen > 0) {
        best[static_cast<size_t>((seen - 1) / block_size)] = rank_of(0x7f80);
      }
      std::fill_n(out + r * groups, groups, false);
      for_best(best, blocks, [&](int64_t b) {
        std::fill(out + r * groups + b * block_size, out + r * groups + std::min(groups, (b + 1) * block_size), true);
      });
    }
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_kernel_ext, m) {
  m.def("index_scores(Tensor q, Tensor weights, Tensor keys) -> Tensor");
  m.def("index_scores_at(Tensor q, Tensor weights, Tensor keys, Tensor slots) -> Tensor");
  m.def("top_groups(Tensor scores, int k) -> Tensor");
  m.def("candidate_groups(Tensor scores, Tensor visible, int blocks, int block_size) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext, CPU, m) {
  m.impl("index_scores", &index_scores);
  m.impl("index_scores_at", &index_scores_at);
  m.impl("top_groups", &top_groups);
  m.impl("candidate_groups", &candidate_groups);
}

}  // namespace sgl_kernel_ext
