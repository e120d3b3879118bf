// Ops `look_up`, `read_rows` and `fuse` of the n-gram memory.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"
#include "dispatch.h"
#include "rows.h"

namespace sgl_kernel_ext {
namespace {

// Rows asked of memory before they are needed: a table lies in no cache, and one row is too short for the hardware to
// see a pattern in.
constexpr int64_t kRowsAhead = 16;

void fetch_lines(const uint8_t* begin, int64_t count) {
  for (int64_t i = 0; i < count; i += 64) {
    __builtin_prefetch(begin + i);
  }
  __builtin_prefetch(begin + count - 1);
}

// serial: without OpenMP. A worker thread that opened a parallel region would get a team of its own, beside the one
// that computes the forward.
at::Tensor look_up(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& rows, bool serial) {
  check("look_up", "codes", codes, at::kByte, 2);
  check("look_up", "scales", scales, at::kByte, 2);
  const int64_t num_rows = codes.size(0), d = codes.size(1);
  TORCH_CHECK_VALUE(d % 32 == 0, "look_up: rows must be a multiple of 32 codes, got shape ", codes.sizes(), " of ",
                    codes.scalar_type());
  check_shape("look_up", "scales", scales, {num_rows, d / 32});
  check("look_up", "rows", rows, at::kLong, 2);
  const int64_t* row = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.numel(); ++i) {
    TORCH_CHECK_INDEX(0 <= row[i] && row[i] < num_rows, "look_up: row ", row[i], " is not in the table of ", num_rows);
  }
  at::Tensor result = at::empty({rows.size(0), rows.size(1) * d}, codes.options().dtype(at::kBFloat16));
  uint16_t* out = mutable_bfloat16_bits(result);
  const auto loop = SGL_KERNEL_EXT_CHOOSE(dequantize_e4m3);
  const auto gather = [&](int64_t begin, int64_t end) {
    const auto fetch = [&](int64_t i) {
      fetch_lines(bytes(codes) + row[i] * d, d);
      fetch_lines(bytes(scales) + row[i] * (d / 32), d / 32);
    };
    for (int64_t i = begin; i < std::min(begin + kRowsAhead, end); ++i) {
      fetch(i);
    }
    for (int64_t i = begin; i < end; ++i) {
      if (i + kRowsAhead < end) {
        fetch(i + kRowsAhead);
      }
      loop(bytes(codes) + row[i] * d, bytes(scales) + row[i] * (d / 32), d, out + i * d);
    }
  };
  if (serial) {
    gather(0, rows.numel());
  } else {
    at::parallel_for(0, rows.numel(), rows_per_task(d), gather);
  }
  return result;
}

// Reads exactly `count` bytes, waiting for the disk: 0, an errno, or ENODATA where the file ends before.
int read_all(int fd, uint8_t* out, int64_t count, int64_t offset) {
  while (count > 0) {
    const ssize_t got = pread(fd, out, count, offset);
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      return got < 0 ? errno : ENODATA;
    }
    out += got, offset += got, count -= got;
  }
  return 0;
}

// Rows of a file -> (index of the first that could not be read, why as an errno), or (-1, 0). Read by calls, not
// through a mapping: a page of a mapping that the file has lost kills the process, and pages read stay in its resident
// set. What the page cache holds is copied at once; the rest is asked of the disk all together before the first wait.
std::tuple<int64_t, int64_t> read_rows(int64_t fd, int64_t offset, const at::Tensor& rows, at::Tensor out) {
  check("read_rows", "rows", rows, at::kLong, 1);
  check("read_rows", "out", out, at::kByte, 2);
  TORCH_CHECK_VALUE(out.size(0) == rows.numel(), "read_rows: out must have ", rows.numel(), " rows, got ", out.sizes());
  const int64_t width = out.size(1);
  const int64_t* row = rows.const_data_ptr<int64_t>();
  uint8_t* to = out.mutable_data_ptr<uint8_t>();
  std::vector<int64_t> waiting;
  for (int64_t i = 0; i < rows.numel(); ++i) {
    TORCH_CHECK_INDEX(row[i] >= 0, "read_rows: row ", row[i]);
    iovec part{to + i * width, static_cast<size_t>(width)};
    if (preadv2(fd, &part, 1, offset + row[i] * width, RWF_NOWAIT) != width) {
      posix_fadvise(fd, offset + row[i] * width, width, POSIX_FADV_WILLNEED);
      waiting.push_back(i);
    }
  }
  for (const int64_t i : waiting) {
    if (const int error = read_all(fd, to + i * width, width, offset + row[i] * width)) {
      return {i, error};
    }
  }
  return {-1, 0};
}

at::Tensor fuse(const at::Tensor& streams, const at::Tensor& keys_value, const at::Tensor& qk_weight, double eps,
                const std::optional<at::Tensor>& alive) {
  check("fuse", "streams", streams, at::kBFloat16, 3);
  const int64_t rows = streams.size(0), n = streams.size(1), d = streams.size(2);
  check("fuse", "keys_value", keys_value, at::kBFloat16, 2);
  check_shape("fuse", "keys_value", keys_value, {rows, (n + 1) * d});
  check("fuse", "qk_weight", qk_weight, at::kFloat, 2);
  check_shape("fuse", "qk_weight", qk_weight, {n, d});
  const bool* lives = nullptr;
  if (alive.has_value()) {
    check("fuse", "alive", *alive, at::kBool, 1);
    check_shape("fuse", "alive", *alive, {rows});
    lives = alive->const_data_ptr<bool>();
  }
  at::Tensor result = at::empty_like(streams);
  uint16_t* out = mutable_bfloat16_bits(result);
  const auto loop = SGL_KERNEL_EXT_CHOOSE(fuse);
  at::parallel_for(0, rows, rows_per_task(n * d), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      loop(bfloat16_bits(streams) + r * n * d, bfloat16_bits(keys_value) + r * (n + 1) * d,
           qk_weight.const_data_ptr<float>(), n, d, static_cast<float>(eps), lives == nullptr || lives[r] ? 1.0f : 0.0f,
           out + r * n * d);
    }
  });
  return result;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(sgl_kernel_ext, m) {
  m.def("look_up(Tensor codes, Tensor scales, Tensor rows, bool serial=False) -> Tensor");
  m.def("read_rows(int fd, int offset, Tensor rows, Tensor(a!) out) -> (int, int)");
  m.def("fuse(Tensor streams, Tensor keys_value, Tensor qk_weight, float eps, Tensor? alive) -> Tensor");
}

TORCH_LIBRARY_IMPL(sgl_kernel_ext, CPU, m) {
  m.impl("look_up", &look_up);
  m.impl("read_rows", &read_rows);
  m.impl("fuse", &fuse);
}

}  // namespace sgl_kernel_ext
