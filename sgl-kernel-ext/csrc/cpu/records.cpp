// Ops `write_records`, `read_records`, `exchange_records` and `round_index`.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "checks.h"
#include "dispatch.h"
#include "e4m3_block_loops.h"
#include "record_loops.h"
#include "rows.h"

namespace sgl_kernel_ext {
namespace {

enum class RecordKind { global, index, window };

// as_bfloat16: the values that a packed record of `packed` bytes would hold, two bytes each.
struct RecordLayout {
  RecordKind kind;
  bool as_bfloat16;
  int64_t dim, packed, nbytes;
};

RecordLayout layout_of(const char* op, const at::Tensor& pool, int64_t dim, const std::string& name) {
  const bool as_bfloat16 = name == "global_bf16" || name == "index_bf16";
  const std::string kind = as_bfloat16 ? name.substr(0, name.find('_')) : name;
  TORCH_CHECK_VALUE(kind == "global" || kind == "index" || kind == "window", op,
                    ": kind must be global, index, window, global_bf16 or index_bf16, got ", name);
  const int64_t block = kind == "global" ? 16 : 32, codes = kind == "window" ? dim : dim / 2;
  TORCH_CHECK_VALUE(dim > 0 && dim % block == 0, op, ": a ", name, " record needs a multiple of ", block,
                    " values, got ", dim);
  check(op, "pool", pool, at::kByte, 2);
  const int64_t packed = codes + dim / block, nbytes = as_bfloat16 ? 2 * dim : packed;
  check_shape(op, "pool", pool, {pool.size(0), nbytes});
  return {kind == "global"  ? RecordKind::global
          : kind == "index" ? RecordKind::index
                            : RecordKind::window,
          as_bfloat16, dim, packed, nbytes};
}

const int64_t* check_rows(const char* op, const at::Tensor& rows, int64_t limit) {
  check(op, "rows", rows, at::kLong, 1);
  const int64_t* row = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.size(0); ++i) {
    TORCH_CHECK_INDEX(0 <= row[i] && row[i] < limit, op, ": row ", row[i], " is not in the pool of ", limit);
  }
  return row;
}

// Value row `source[i]` (i, if null) into record `row[i]`.
void store(uint8_t* pool, const RecordLayout& layout, const int64_t* row, int64_t count, const uint16_t* values,
           const int64_t* source) {
  const bool global = layout.kind == RecordKind::global;
  const auto encode = global ? SGL_KERNEL_EXT_CHOOSE(encode_global) : SGL_KERNEL_EXT_CHOOSE(encode_index);
  const auto decode = global ? SGL_KERNEL_EXT_CHOOSE(decode_global) : SGL_KERNEL_EXT_CHOOSE(decode_index);
  const auto window = SGL_KERNEL_EXT_CHOOSE(quantize_e4m3);
  at::parallel_for(0, count, rows_per_task(layout.dim), [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> packed(static_cast<size_t>(layout.packed));
    for (int64_t i = begin; i < end; ++i) {
      const uint16_t* x = values + (source == nullptr ? i : source[i]) * layout.dim;
      uint8_t* record = pool + row[i] * layout.nbytes;
      if (layout.kind == RecordKind::window) {
        window(x, record, record + layout.dim, layout.dim / kBlock);
      } else if (layout.as_bfloat16) {
        encode(x, layout.dim, packed.data());
        decode(packed.data(), layout.dim, reinterpret_cast<uint16_t*>(record));
      } else {
        encode(x, layout.dim, record);
      }
    }
  });
}

void load(const uint8_t* pool, const RecordLayout& layout, const int64_t* row, int64_t count, uint16_t* out) {
  const int64_t dim = layout.dim;
  const bool global = layout.kind == RecordKind::global;
  const auto decode = global ? SGL_KERNEL_EXT_CHOOSE(decode_global) : SGL_KERNEL_EXT_CHOOSE(decode_index);
  const auto window = SGL_KERNEL_EXT_CHOOSE(dequantize_e4m3);
  at::parallel_for(0, count, rows_per_task(dim), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint8_t* record = pool + row[i] * layout.nbytes;
      if (layout.kind == RecordKind::window) {
        window(record, record + dim, dim, out + i * dim);
      } else if (layout.as_bfloat16) {
        std::memcpy(out + i * dim, record, static_cast<size_t>(layout.nbytes));
      } else {
        decode(record, dim, out + i * dim);
      }
    }
  });
}

void write_records(const at::Tensor& pool, const at::Tensor& rows, const at::Tensor& values, const std::string& kind) {
  check("write_records", "values", values, at::kBFloat16, 2);
  const RecordLayout layout = layout_of("write_records", pool, values.size(1), kind);
  check_shape("write_records", "values", values, {rows.size(0), layout.dim});
  const int64_t* row = check_rows("write_records", rows, pool.size(0));
  store(static_cast<uint8_t*>(pool.mutable_data_ptr()), layout, row, rows.size(0), bfloat16_bits(values), nullptr);
}

at::Tensor read_records(const at::Tensor& pool, const at::Tensor& rows, int64_t dim, const std::string& kind) {
  const RecordLayout layout = layout_of("read_records", pool, dim, kind);
  const int64_t* row = check_rows("read_records", rows, pool.size(0));
  at::Tensor result = at::empty({rows.size(0), dim}, pool.options().dtype(at::kBFloat16));
  load(bytes(pool), layout, row, rows.size(0), mutable_bfloat16_bits(result));
  return result;
}

at::Tensor exchange_records(const at::Tensor& pool, const at::Tensor& prior_rows, const at::Tensor& kept_rows,
                            const at::Tensor& rows, const at::Tensor& values, const std::string& kind) {
  const char* op = "exchange_records";
  check(op, "values", values, at::kBFloat16, 2);
  const RecordLayout layout = layout_of(op, pool, values.size(1), kind);
  const int64_t *prior = check_rows(op, prior_rows, pool.size(0)), *row = check_rows(op, rows, pool.size(0));
  const int64_t* kept = check_rows(op, kept_rows, values.size(0));
  check_shape(op, "kept_rows", kept_rows, rows.sizes());
  at::Tensor result = at::empty({prior_rows.size(0) + values.size(0), layout.dim}, values.options());
  uint16_t* out = mutable_bfloat16_bits(result);
  load(bytes(pool), layout, prior, prior_rows.size(0), out);
  std::copy_n(bfloat16_bits(values), values.numel(), out + prior_rows.numel() * layout.dim);
  store(static_cast<uint8_t*>(pool.mutable_data_ptr()), layout, row, rows.size(0), bfloat16_bits(values), kept);
  return result;
}

at::Tensor round_index(const at::Tensor& x) {
  check_dtype("round_index", "x", x, at::kBFloat16);
  TORCH_CHECK_VALUE(x.dim() >= 1 && x.size(-1) % kBlock == 0,
                    "round_index: the last dimension of x must be a multiple "
                    "of ",
                    kBlock, ", got shape ", x.sizes(), " of ", x.scalar_type());
  check_contiguous("round_index", "x", x);
  at::Tensor result = at::empty_like(x);
  const uint16_t* in = bfloat16_bits(x);
  uint16_t* out = mutable_bfloat16_bits(result);
  const auto loop = SGL_KERNEL_EXT_CHOOSE(round_index);
  at::parallel_for(0, x.numel() / kBlock, rows_per_task(kBlock), [&](int64_t begin, int64_t end) {
    loop(in + begin * kBlock, (end - begin) * kBlock, out + begin * kBlock);
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_kernel_ext, m) {
  m.def("write_records(Tensor(a!) pool, Tensor rows, Tensor values, str kind) -> ()");
  m.def("read_records(Tensor pool, Tensor rows, int dim, str kind) -> Tensor");
  m.def(
      "exchange_records(Tensor(a!) pool, Tensor prior_rows, Tensor kept_rows, Tensor rows, Tensor values, str kind) -> "
      "Tensor");
  m.def("round_index(Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext, CPU, m) {
  m.impl("write_records", &write_records);
  m.impl("read_records", &read_records);
  m.impl("exchange_records", &exchange_records);
  m.impl("round_index", &round_index);
}

}  // namespace sgl_kernel_ext
