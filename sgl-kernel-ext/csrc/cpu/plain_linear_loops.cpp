// Products summed in float64, whatever the weight is stored as. Compiled once per CPU level; see e4m3_block_loops.cpp
// for what that forbids. Every product of two of the formats is exact in float64.

#include "e4m3_wide.h"
#include "plain_loops.h"
#include "simd_dot.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

constexpr int64_t kBlock = 32;
constexpr int kColumns = static_cast<int>(kPlainTile);
static_assert(kColumns == kDotColumns);
// So few rows take the weights as they are; for more, four columns are decoded first.
constexpr int64_t kRowsUnpacked = 2 * kDotRows;
// Inputs are held times 2^500 and stored weights times 2^-500, so that decoding a weight takes one multiplication.
constexpr int kStoredShift = 500;

constexpr double kE2m1[16] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};

constexpr bool is_stored(WeightKind kind) { return kind == WeightKind::e4m3 || kind == WeightKind::e2m1; }

template <typename Read>
void widen(int64_t count, WeightKind kind, double* out, const Read& read) {
  const double factor = is_stored(kind) ? power_of_two(kStoredShift) : 1.0;
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<double>(read(i)) * factor;
  for (int64_t i = count; i % 8 != 0; ++i) out[i] = 0.0;
}

constexpr int64_t bits_of(WeightKind kind) {
  return kind == WeightKind::float32 ? 32 : kind == WeightKind::bfloat16 ? 16 : kind == WeightKind::e4m3 ? 8 : 4;
}

// A column of the weight, eight inputs at a time. `factors`, one per block of 32, are made by `prepare`.
template <WeightKind kKind>
struct Column {
  const uint8_t* data;
  const uint8_t* scales;
  double* factors;

  Column(const PlainWeight& weight, int64_t column, double* factors_room) {
    const int64_t blocks = (weight.k + kBlock - 1) / kBlock;
    data = static_cast<const uint8_t*>(weight.data) + column * weight.k * bits_of(kKind) / 8;
    scales = weight.scales + (kKind == WeightKind::e4m3 ? column / kBlock : column) * blocks;
    factors = factors_room;
  }

  void prepare(int64_t k) const {
    if constexpr (is_stored(kKind)) {
      const int shift = (kKind == WeightKind::e4m3 ? kE4m3Shift : 0) - kStoredShift;
      for (int64_t i = 0; i < (k + kBlock - 1) / kBlock; ++i) factors[i] = power_of_two(scales[i] - 127 + shift);
    }
  }

  SGL_KERNEL_EXT_INLINE Eight decode(const uint8_t* p, [[maybe_unused]] int64_t first) const {
    if constexpr (kKind == WeightKind::float32) {
      return load8_float(reinterpret_cast<const float*>(p));
    } else if constexpr (kKind == WeightKind::bfloat16) {
      return load8_bfloat16(reinterpret_cast<const uint16_t*>(p));
    } else if constexpr (kKind == WeightKind::e4m3) {
      Eight value = load8_e4m3(p);
      const Doubles factor = all(factors[static_cast<uint64_t>(first) / kBlock]);
      for (int i = 0; i < kParts; ++i) value.part[i] *= factor;
      return value;
    } else {
      double values[8];
      for (int i = 0; i < 4; ++i) {
        values[2 * i] = kE2m1[p[i] & 15] * factors[static_cast<uint64_t>(first) / kBlock];
        values[2 * i + 1] = kE2m1[p[i] >> 4] * factors[static_cast<uint64_t>(first) / kBlock];
      }
      return load8(values);
    }
  }

  SGL_KERNEL_EXT_INLINE Eight get(int64_t first) const { return decode(data + first * bits_of(kKind) / 8, first); }

  Eight get_tail(int64_t first, int64_t k) const {
    uint8_t bytes[32] = {};
    __builtin_memcpy(bytes, data + first * bits_of(kKind) / 8, static_cast<uint64_t>((k - first) * bits_of(kKind) / 8));
    return decode(bytes, first);
  }

  // A NaN among codes or scales, or a scale that takes a value beyond float32.
  bool is_unusual(int64_t k) const {
    uint8_t largest = 0, largest_scale = 0;
    if constexpr (kKind == WeightKind::e4m3) {
      for (int64_t i = 0; i < k; ++i) {
        const uint8_t magnitude = data[i] & 0x7f;
        largest = magnitude > largest ? magnitude : largest;
      }
    }
    if constexpr (kKind == WeightKind::e4m3 || kKind == WeightKind::e2m1) {
      for (int64_t i = 0; i < (k + kBlock - 1) / kBlock; ++i) {
        largest_scale = scales[i] > largest_scale ? scales[i] : largest_scale;
      }
    }
    return largest == 0x7f || largest_scale > (kKind == WeightKind::e4m3 ? 246 : 252);
  }

  // What `get` gives, for any codes: as the definition dequantises, in float32.
  void careful(int64_t k, double* out) const {
    for (int64_t i = 0; i < (k + 7) / 8 * 8; ++i) out[i] = 0.0;
    for (int64_t i = 0; i < k; ++i) {
      const uint8_t scale = scales[i / kBlock];
      float value;
      if constexpr (kKind == WeightKind::e4m3) {
        const float magnitude =
            (data[i] & 0x7f) == 0x7f ? __builtin_nanf("") : as_float((data[i] & 0x7f) << 20) * 0x1p+120f;
        value = (data[i] & 0x80) != 0 ? -magnitude : magnitude;
      } else {
        value = static_cast<float>(kE2m1[i % 2 == 0 ? data[i / 2] & 15 : data[i / 2] >> 4]);
      }
      value *= scale == 255 ? __builtin_nanf("") : scale == 0 ? 0x1p-127f : as_float(scale << 23);
      out[i] = static_cast<double>(value) * power_of_two(-kStoredShift);
    }
  }
};

// One row by four columns of e4m3 weights that share their scales. These go to the inputs, once for all columns, so the
// sums are times 2^-kStoredShift until the end; powers of two change no bit.
SGL_KERNEL_EXT_INLINE Eight scaled_inputs(const double* x, uint8_t scale) {
  Eight value = load8(x);
  const Doubles factor = all(power_of_two(scale - 127 + kE4m3Shift - 2 * kStoredShift));
  for (int i = 0; i < kParts; ++i) value.part[i] *= factor;
  return value;
}

#if defined(__AVX512VBMI__)
// Sixty-four codes at a time; returns how many of the k inputs are done.
int64_t add_many(const double* x, const uint8_t* codes, int64_t k, const uint8_t* scales, Eight* sums) {
  int64_t first = 0;
  for (; first + kCodes <= k; first += kCodes) {
    const auto column = [&](int c) {
      const uint8_t* p = codes + c * k + first;
      __builtin_prefetch(p + kColumns * k);
      return Codes(load_bytes(p));
    };
    const Codes columns[kColumns] = {column(0), column(1), column(2), column(3)};
    for (int g = 0; g < 8; ++g) {
      const Eight input = scaled_inputs(x + first + 8 * g, scales[first / kBlock + g / 4]);
      const Bytes places = load_bytes(kNeighbours.of[g]);
      for (int c = 0; c < kColumns; ++c) {
        sums[c].part[0] = add_product(sums[c].part[0], input.part[0], columns[c].eight(places));
      }
    }
  }
  return first;
}
#else
int64_t add_many(const double*, const uint8_t*, int64_t, const uint8_t*, Eight*) { return 0; }
#endif

void one_row(const double* x, const uint8_t* codes, int64_t k, const uint8_t* scales, double* out) {
  Eight sums[kColumns];
  for (int c = 0; c < kColumns; ++c) sums[c] = zero8();
  for (int64_t i = add_many(x, codes, k, scales, sums); i < k; i += 8) {
    const Eight input = scaled_inputs(x + i, scales[i / kBlock]);
    for (int c = 0; c < kColumns; ++c) add_product8(sums[c], input, load8_e4m3(codes + c * k + i));
  }
  sum_lanes4(sums, out);
  for (int c = 0; c < kColumns; ++c) out[c] *= power_of_two(kStoredShift);
}

template <WeightKind kKind>
void tile(const double* x, int64_t stride, int64_t num_rows, const PlainWeight& weight, int64_t column, int64_t columns,
          double* scratch, double* out) {
  const int64_t k = weight.k, steps = (k + 7) / 8, padded = steps * 8, blocks = (k + kBlock - 1) / kBlock;
  const auto at = [&](int64_t c) {
    return Column<kKind>(weight, column + (c < columns ? c : columns - 1), scratch + kColumns * padded + c * blocks);
  };
  const Column<kKind> w[kColumns] = {at(0), at(1), at(2), at(3)};
  bool unusual[kColumns], any = false;
  for (int c = 0; c < kColumns; ++c) {
    any |= unusual[c] = is_stored(kKind) && w[c].is_unusual(k);
  }
  if (kKind == WeightKind::e4m3 && num_rows == 1 && k % 8 == 0 && !any && columns == kColumns &&
      w[0].scales == w[kColumns - 1].scales) {
    one_row(x, w[0].data, k, w[0].scales, out);
    return;
  }
  for (int c = 0; c < kColumns; ++c) w[c].prepare(k);
  if (num_rows <= kRowsUnpacked && k % 8 == 0 && !any) {
    all_dots(x, stride, num_rows, steps, out, kColumns, [&](int c, int64_t i) __attribute__((always_inline)) {
      constexpr int64_t kAhead = 1024;
      __builtin_prefetch(w[c].data + i * bits_of(kKind) / 8 + kAhead);
      return w[c].get(i);
    });
    return;
  }
  for (int c = 0; c < kColumns; ++c) {
    double* panel = scratch + c * padded;
    if (unusual[c]) {
      w[c].careful(k, panel);
      continue;
    }
    for (int64_t i = 0; i + 8 <= k; i += 8) store8(panel + i, w[c].get(i));
    if (k % 8 != 0) {
      store8(panel + k / 8 * 8, w[c].get_tail(k / 8 * 8, k));
    }
  }
  const auto from_panel = [&](int c, int64_t i)
                              __attribute__((always_inline)) { return load8(scratch + c * padded + i); };
  all_dots(x, stride, num_rows, steps, out, kColumns, from_panel);
}

}  // namespace

void widen_bfloat16(const uint16_t* x, int64_t count, WeightKind kind, double* out) {
  widen(count, kind, out, [&](int64_t i) { return from_bfloat16(x[i]); });
}

void widen_float(const float* x, int64_t count, WeightKind kind, double* out) {
  widen(count, kind, out, [&](int64_t i) { return x[i]; });
}

void plain_tile(const double* x, int64_t stride, int64_t num_rows, const PlainWeight& weight, int64_t column,
                int64_t columns, double* scratch, double* out) {
  const auto run = [&](auto loop) { loop(x, stride, num_rows, weight, column, columns, scratch, out); };
  switch (weight.kind) {
    case WeightKind::float32:
      return run(tile<WeightKind::float32>);
    case WeightKind::bfloat16:
      return run(tile<WeightKind::bfloat16>);
    case WeightKind::e4m3:
      return run(tile<WeightKind::e4m3>);
    case WeightKind::e2m1:
      return run(tile<WeightKind::e2m1>);
  }
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
