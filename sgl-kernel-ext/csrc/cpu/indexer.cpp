// Ops `index_scores`, `top_groups` and `candidate_groups`.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <vector>

#include "checks.h"
#include "dispatch.h"
#include "indexer_loops.h"
#include "rows.h"

namespace sgl_kernel_ext {
namespace {

constexpr int64_t kKeysPerTask = 256;

at::Tensor index_scores(const at::Tensor& q, const at::Tensor& weights, const at::Tensor& keys) {
  check("index_scores", "q", q, at::kBFloat16, 3);
  const int64_t rows = q.size(0), heads = q.size(1), dim = q.size(2), groups = keys.size(0);
  TORCH_CHECK_VALUE(dim % 32 == 0, "index_scores: the last dimension of q must be a multiple of 32, got shape ",
                    q.sizes(), " of ", q.scalar_type());
  check("index_scores", "weights", weights, at::kBFloat16, 2);
  check_shape("index_scores", "weights", weights, {rows, heads});
  check("index_scores", "keys", keys, at::kByte, 2);
  const int64_t packed = dim / 2 + dim / 32;
  const bool as_bfloat16 = holds_bfloat16("index_scores", "keys", keys, packed, dim);
  at::Tensor result = at::empty({rows, groups}, q.options()),
             wide = at::empty(q.sizes(), q.options().dtype(at::kDouble));
  double* query = wide.mutable_data_ptr<double>();
  uint16_t* out = mutable_bfloat16_bits(result);
  const auto widen = SGL_KERNEL_EXT_CHOOSE(widen);
  widen(bfloat16_bits(q), q.numel(), query);
  const auto decode = SGL_KERNEL_EXT_CHOOSE(decode_keys);
  const auto score = SGL_KERNEL_EXT_CHOOSE(score_keys);
  at::parallel_for(0, (groups + kKeysAtOnce - 1) / kKeysAtOnce, kKeysPerTask / kKeysAtOnce,
                   [&](int64_t begin, int64_t end) {
                     at::Tensor scratch = at::empty({kKeysAtOnce * (dim + heads)}, at::kDouble);
                     double* decoded = scratch.mutable_data_ptr<double>();
                     for (int64_t block = begin; block < end; ++block) {
                       const int64_t first = block * kKeysAtOnce, count = std::min(kKeysAtOnce, groups - first);
                       if (as_bfloat16) {
                         widen(bfloat16_bits(keys) + first * dim, count * dim, decoded);
                       } else {
                         decode(bytes(keys) + first * packed, packed, count, dim, decoded);
                       }
                       for (int64_t r = 0; r < rows; ++r) {
                         score(query + r * heads * dim, bfloat16_bits(weights) + r * heads, heads, decoded, count, dim,
                               decoded + kKeysAtOnce * dim, out + r * groups + first);
                       }
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
  m.def("top_groups(Tensor scores, int k) -> Tensor");
  m.def("candidate_groups(Tensor scores, Tensor visible, int blocks, int block_size) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext, CPU, m) {
  m.impl("index_scores", &index_scores);
  m.impl("top_groups", &top_groups);
  m.impl("candidate_groups", &candidate_groups);
}

}  // namespace sgl_kernel_ext
