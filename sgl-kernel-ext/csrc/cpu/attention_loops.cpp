// Compiled once per CPU level; see e4m3_block_loops.cpp for what that forbids.
//
// Rounding points are those of the definition: a score is a float64 dot rounded to float32 and scaled there; exp is
// taken in float64 and rounded to float32; probabilities enter the product with the values as bfloat16. Sums are
// float64 in another order than torch's, so a result differs only where a sum lies within about 2^-50 of a rounding
// boundary.

#include "attention_loops.h"

#include "simd_dot.h"
#include "simd_math.h"
#include "simd_record.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

constexpr int64_t kSoftmaxBlock = 64;
constexpr int kHeadsAtOnce = kLanes == 8 ? 4 : kLanes == 4 ? 2 : 1;
constexpr int kVectors = 2;  // of eight values

// A row of keys is eight doubles longer than it must be, so that a column of them does not fall into one cache set.
SGL_KERNEL_EXT_INLINE int64_t key_stride(int64_t dim) { return dim + 8; }

struct Scratch {
  double *q, *out, *keys, *scores, *total, *fade;
  float* top;

  Scratch(double* p, int64_t heads, int64_t dim) {
    q = p;
    out = q + heads * dim;
    keys = out + heads * dim;
    scores = keys + kSoftmaxBlock * key_stride(dim);
    total = scores + heads * kSoftmaxBlock;
    fade = total + heads;
    top = reinterpret_cast<float*>(fade + heads);
  }
};

SGL_KERNEL_EXT_INLINE float exp_of(float x) { return static_cast<float>(exp(all(static_cast<double>(x)))[0]); }

// Decodes the entries that exist, in order; returns how many do.
int64_t gather(const KeySource& source, const int64_t* keys, int64_t count, double* out) {
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (keys[i] < 0) {
      continue;
    }
    double* row = out + found++ * key_stride(source.dim);
    const uint16_t* stored = source.window + keys[i] * source.dim;
    if (keys[i] >= source.num_window) {
      const uint8_t* record = source.pool + (keys[i] - source.num_window) * source.record_bytes();
      if (!source.pool_is_bfloat16) {
        decode_global_record(record, source.dim, row);
        continue;
      }
      stored = reinterpret_cast<const uint16_t*>(record);
    }
    for (int64_t d = 0; d < source.dim; d += 8) store8(row + d, load8_bfloat16(stored + d));
  }
  return found;
}

typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

SGL_KERNEL_EXT_INLINE Floats all_floats(float value) { return Floats{} + value; }

// `round_bfloat16` of each, as float32.
SGL_KERNEL_EXT_INLINE Floats rounded(Floats x) {
  const Ints bits = __builtin_bit_cast(Ints, x);
  const Ints up = (bits + 0x7fff + ((bits >> 16) & 1)) & static_cast<int32_t>(0xffff0000u);
  return __builtin_bit_cast(Floats, x == x ? up : Ints{} + 0x7fc00000);
}

// scores [64] of one head, as dots in float64, of which `count` exist -> probabilities, already rounded to bfloat16;
// zeros behind them. Returns the fade factor of what was there before, and moves `top` and `total` on.
SGL_KERNEL_EXT_INLINE double softmax_block(double* scores, int64_t count, float scale, float* top, double* total) {
  for (int64_t j = count; j % 8 != 0; ++j) scores[j] = -__builtin_inf();
  Floats scaled[kSoftmaxBlock / kLanes], tops = all_floats(*top);
  for (int64_t j = 0; j * kLanes < count; ++j) {
    scaled[j] = __builtin_convertvector(load(scores + j * kLanes), Floats) * scale;
    tops = scaled[j] > tops ? scaled[j] : tops;
  }
  float new_top = *top;
  for (int lane = 0; lane < kLanes; ++lane) new_top = tops[lane] > new_top ? tops[lane] : new_top;
  const float base = new_top == -__builtin_inff() ? 0.0f : new_top;
  Eight sums[4] = {zero8(), zero8(), zero8(), zero8()};
  for (int64_t j = 0; j * kLanes < count; ++j) {
    const Floats p = __builtin_convertvector(exp(__builtin_convertvector(scaled[j] - base, Doubles)), Floats);
    sums[0].part[j % kParts] += __builtin_convertvector(p, Doubles);
    store(scores + j * kLanes, __builtin_convertvector(rounded(p), Doubles));
  }
  double sum[4];
  sum_lanes4(sums, sum);
  const double fade = static_cast<double>(exp_of(*top - base));
  *total = *total * fade + sum[0];
  *top = new_top;
  return fade;
}

// Dimensions [d, d + 16) of out [kHeads][dim] = out * fade + probabilities [kHeads][64] by keys [count][dim].
template <int kHeads>
SGL_KERNEL_EXT_INLINE void add_values(const double* scores, const double* keys, int64_t count, int64_t dim, int64_t d,
                                      const double* fade, double* out) {
  Eight sums[kHeads][kVectors];
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVectors; ++v) {
      sums[h][v] = load8(out + h * dim + d + 8 * v);
      for (int i = 0; i < kParts; ++i) sums[h][v].part[i] *= all(fade[h]);
    }
  }
  for (int64_t j = 0; j < count; ++j) {
    Eight values[kVectors];
    for (int v = 0; v < kVectors; ++v) values[v] = load8(keys + j * key_stride(dim) + d + 8 * v);
    for (int h = 0; h < kHeads; ++h) {
      const Doubles p = all(scores[h * kSoftmaxBlock + j]);
      for (int v = 0; v < kVectors; ++v) {
        for (int i = 0; i < kParts; ++i) sums[h][v].part[i] = add_product(sums[h][v].part[i], p, values[v].part[i]);
      }
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    for (int v = 0; v < kVectors; ++v) store8(out + h * dim + d + 8 * v, sums[h][v]);
  }
}

}  // namespace

void attend_row(const uint16_t* q, int64_t heads, const KeySource& source, const int64_t* keys, int64_t num_keys,
                const float* sink, double* scratch, uint16_t* out) {
  const int64_t dim = source.dim, stride = key_stride(dim);
  const float scale = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(dim)));
  const Scratch s(scratch, heads, dim);
  for (int64_t i = 0; i < heads * dim; i += 8) {
    store8(s.q + i, load8_bfloat16(q + i));
    store8(s.out + i, zero8());
  }
  for (int64_t h = 0; h < heads; ++h) {
    s.top[h] = -__builtin_inff();
    s.total[h] = 0.0;
  }
  for (int64_t first = 0; first < num_keys; first += kSoftmaxBlock) {
    const int64_t left = num_keys - first;
    const int64_t count = gather(source, keys + first, left < kSoftmaxBlock ? left : kSoftmaxBlock, s.keys);
    if (count == 0) {
      continue;
    }
    for (int64_t j = 0; j < count; j += kDotColumns) {
      all_dots(s.q, dim, heads, dim / 8, s.scores + j, kSoftmaxBlock,
               [&](int c, int64_t i) __attribute__((always_inline)) {
                 return load8(s.keys + (j + c < count ? j + c : count - 1) * stride + i);
               });
    }
    for (int64_t h = 0; h < heads; ++h) {
      s.fade[h] = softmax_block(s.scores + h * kSoftmaxBlock, count, scale, s.top + h, s.total + h);
    }
    // A column of keys serves all heads while it is near.
    for (int64_t d = 0; d < dim; d += 8 * kVectors) {
      int64_t h = 0;
      for (; h + kHeadsAtOnce <= heads; h += kHeadsAtOnce) {
        add_values<kHeadsAtOnce>(s.scores + h * kSoftmaxBlock, s.keys, count, dim, d, s.fade + h, s.out + h * dim);
      }
      for (; h < heads; ++h) {
        add_values<1>(s.scores + h * kSoftmaxBlock, s.keys, count, dim, d, s.fade + h, s.out + h * dim);
      }
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    const float base = s.top[h] == -__builtin_inff() ? 0.0f : s.top[h];
    const double total = s.total[h] + static_cast<double>(exp_of(sink[h] - base));
    for (int64_t d = 0; d < dim; ++d) out[h * dim + d] = round_bfloat16(static_cast<float>(s.out[h * dim + d] / total));
  }
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
