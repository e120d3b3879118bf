// Products summed in float64, whatever the weight is stored as. Compiled once per CPU level; see e4m3_block_loops.cpp
// for what that forbids. Every product of two of the formats is exact in float64.

#include "plain_loops.h"
#include "simd_bytes.h"
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

bool has_nan(const uint8_t* codes, int64_t count) {
  uint8_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint8_t magnitude = codes[i] & 0x7f;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest == 0x7f;
}

template <WeightKind kKind>
bool has_unusual_scale(const uint8_t* scales, int64_t k) {
  uint8_t largest = 0;
  for (int64_t i = 0; i < (k + kBlock - 1) / kBlock; ++i) largest = scales[i] > largest ? scales[i] : largest;
  return largest > (kKind == WeightKind::e4m3 ? 246 : 252);
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
    return (kKind == WeightKind::e4m3 && has_nan(data, k)) || (is_stored(kKind) && has_unusual_scale<kKind>(scales, k));
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
constexpr int kCodes = 64;

// Where the bytes of eight doubles come from: below 32 a code, shifted by one; from 32 on its sign; 64 is a zero. A
// code makes the two upper bytes, as in load8_e4m3.
struct Places {
  alignas(64) uint8_t of[4][64];
};

constexpr Places make_places() {
  Places places{};
  for (int i = 0; i < 4 * 64; ++i) {
    places.of[i / 64][i % 64] = static_cast<uint8_t>(i % 8 == 6 ? i / 8 : i % 8 == 7 ? 32 + i / 8 : 64);
  }
  return places;
}
constexpr Places kPlaces = make_places();

// The shifted codes and the signs of each half of sixty-four.
struct Codes {
  Bytes halves[2];

  SGL_KERNEL_EXT_INLINE explicit Codes(Bytes codes) {
    const Bytes shifted = _mm512_add_epi8(codes, codes), signs = _mm512_and_si512(codes, _mm512_set1_epi8(-128));
    halves[0] = _mm512_inserti64x4(shifted, _mm512_castsi512_si256(signs), 1);
    halves[1] = _mm512_shuffle_i64x2(shifted, signs, 0xee);
  }
  SGL_KERNEL_EXT_INLINE Doubles eight(int half, Bytes places) const {
    return _mm512_castsi512_pd(_mm512_permutex2var_epi8(halves[half], places, Bytes{}));
  }
};

// Sixty-four codes at a time. Returns how many of the k inputs are done, or -1 if there is a NaN.
int64_t add_many(const double* x, const uint8_t* codes, int64_t k, const uint8_t* scales, Eight* sums) {
  Bytes places[4], largest = Bytes{};
  for (int i = 0; i < 4; ++i) places[i] = load_bytes(kPlaces.of[i]);
  int64_t first = 0;
  for (; first + kCodes <= k; first += kCodes) {
    const auto column = [&](int c) {
      const uint8_t* p = codes + c * k + first;
      __builtin_prefetch(codes + kColumns * (k + first) + c * kCodes);
      const Bytes column = load_bytes(p);
      largest = _mm512_max_epu8(largest, _mm512_add_epi8(column, column));
      return Codes(column);
    };
    const Codes columns[kColumns] = {column(0), column(1), column(2), column(3)};
    for (int g = 0; g < 8; ++g) {
      const Eight input = scaled_inputs(x + first + 8 * g, scales[first / kBlock + g / 4]);
      for (int c = 0; c < kColumns; ++c) {
        sums[c].part[0] = add_product(sums[c].part[0], input.part[0], columns[c].eight(g / 4, places[g % 4]));
      }
    }
  }
  return _mm512_cmpeq_epu8_mask(largest, _mm512_set1_epi8(-2)) == 0 ? first : -1;
}
#else
int64_t add_many(const double*, const uint8_t*, int64_t, const uint8_t*, Eight*) { return 0; }
#endif

// False if a code or a scale is unusual.
bool one_row(const double* x, const Column<WeightKind::e4m3>& column, int64_t k, double* out) {
  Eight sums[kColumns];
  for (int c = 0; c < kColumns; ++c) sums[c] = zero8();
  const int64_t done = add_many(x, column.data, k, column.scales, sums);
  if (done < 0 || has_unusual_scale<WeightKind::e4m3>(column.scales, k)) {
    return false;
  }
  for (int c = 0; c < kColumns; ++c) {
    if (has_nan(column.data + c * k + done, k - done)) {
      return false;
    }
  }
  for (int64_t i = done; i < k; i += 8) {
    const Eight input = scaled_inputs(x + i, column.scales[i / kBlock]);
    for (int c = 0; c < kColumns; ++c) add_product8(sums[c], input, load8_e4m3(column.data + c * k + i));
  }
  sum_lanes4(sums, out);
  for (int c = 0; c < kColumns; ++c) out[c] *= power_of_two(kStoredShift);
  return true;
}

template <WeightKind kKind>
void tile(const double* x, int64_t stride, int64_t num_rows, const PlainWeight& weight, int64_t column, int64_t columns,
          double* scratch, double* out) {
  const int64_t k = weight.k, steps = (k + 7) / 8, padded = steps * 8, blocks = (k + kBlock - 1) / kBlock;
  const auto at = [&](int64_t c) {
    return Column<kKind>(weight, column + (c < columns ? c : columns - 1), scratch + kColumns * padded + c * blocks);
  };
  const Column<kKind> w[kColumns] = {at(0), at(1), at(2), at(3)};
  if constexpr (kKind == WeightKind::e4m3) {
    if (num_rows == 1 && k % 8 == 0 && columns == kColumns && w[0].scales == w[kColumns - 1].scales &&
        one_row(x, w[0], k, out)) {
      return;
    }
  }
  bool unusual[kColumns], any = false;
  for (int c = 0; c < kColumns; ++c) any |= unusual[c] = w[c].is_unusual(k);
  for (int c = 0; c < kColumns; ++c) w[c].prepare(k);
  if (num_rows <= kRowsUnpacked && k % 8 == 0 && !any) {
    // The next tile, or what comes next of long columns.
    const int64_t bytes = k * bits_of(kKind) / 8, ahead = bytes <= 2048 ? kColumns * bytes : 1024;
    all_dots(x, stride, num_rows, steps, out, kColumns, [&](int c, int64_t i) __attribute__((always_inline)) {
      __builtin_prefetch(w[c].data + i * bits_of(kKind) / 8 + ahead);
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
