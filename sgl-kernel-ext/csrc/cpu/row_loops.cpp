// Compiled once per CPU level; see e4m3_block_loops.cpp for what that forbids.

#include "row_loops.h"

#include "simd_math.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

struct Bfloat16s {
  const uint16_t* p;
  SGL_KERNEL_EXT_INLINE float operator[](int64_t i) const { return from_bfloat16(p[i]); }
  SGL_KERNEL_EXT_INLINE Eight eight(int64_t i) const { return load8_bfloat16(p + i); }
};

struct Float32s {
  const float* p;
  SGL_KERNEL_EXT_INLINE float operator[](int64_t i) const { return p[i]; }
  SGL_KERNEL_EXT_INLINE Eight eight(int64_t i) const { return load8_float(p + i); }
};

// run(values) with the row as its type.
template <typename Run>
SGL_KERNEL_EXT_INLINE auto with(Row row, const Run& run) {
  return row.is_float ? run(Float32s{static_cast<const float*>(row.data)})
                      : run(Bfloat16s{static_cast<const uint16_t*>(row.data)});
}

SGL_KERNEL_EXT_INLINE double sum_lanes(const Eight& x) {
  const Eight four[4] = {x, zero8(), zero8(), zero8()};
  double sums[4];
  sum_lanes4(four, sums);
  return sums[0];
}

template <typename Values>
SGL_KERNEL_EXT_INLINE float inverse_rms_of(const Values& x, int64_t count, float eps) {
  Eight squares = zero8();
  for (int64_t i = 0; i + 8 <= count; i += 8) {
    const Eight value = x.eight(i);
    add_product8(squares, value, value);
  }
  double sum = sum_lanes(squares);
  for (int64_t i = count / 8 * 8; i < count; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return 1.0f / __builtin_sqrtf(static_cast<float>(sum / static_cast<double>(count)) + eps);
}

}  // namespace

float inverse_rms(Row x, int64_t count, float eps) {
  return with(x, [&](const auto& values) { return inverse_rms_of(values, count, eps); });
}

void rms_norm(Row x, Row weight, int64_t count, float eps, uint16_t* __restrict out) {
  with(x, [&](const auto& values) {
    const float factor = inverse_rms_of(values, count, eps);
    with(weight, [&](const auto& weights) {
      for (int64_t i = 0; i < count; ++i) out[i] = round_bfloat16(values[i] * factor * weights[i]);
    });
  });
}

void rotate(const uint16_t* x, const float* cos, const float* sin, bool inverse, int64_t pairs, uint16_t* out) {
  const uint32_t flip = inverse ? 0x80000000u : 0u;
  for (int64_t i = 0; i < pairs; ++i) {
    const float even = from_bfloat16(x[2 * i]), odd = from_bfloat16(x[2 * i + 1]);
    const float s = as_float(static_cast<int32_t>(as_bits(sin[i]) ^ flip));
    out[2 * i] = round_bfloat16(even * cos[i] - odd * s);
    out[2 * i + 1] = round_bfloat16(even * s + odd * cos[i]);
  }
}

void collapse(const uint16_t* __restrict streams, const float* __restrict weights, int64_t n, int64_t d,
              uint16_t* __restrict out) {
  if (n == 4) {  // the published number, worth one pass
    const float a = weights[0], b = weights[1], c = weights[2], e = weights[3];
    for (int64_t i = 0; i < d; ++i) {
      const float first = from_bfloat16(streams[i]) * a + from_bfloat16(streams[d + i]) * b;
      out[i] = round_bfloat16(first + from_bfloat16(streams[2 * d + i]) * c + from_bfloat16(streams[3 * d + i]) * e);
    }
    return;
  }
  for (int64_t i = 0; i < d; ++i) {
    float sum = from_bfloat16(streams[i]) * weights[0];
    for (int64_t k = 1; k < n; ++k) sum = sum + from_bfloat16(streams[k * d + i]) * weights[k];
    out[i] = round_bfloat16(sum);
  }
}

void expand(const uint16_t* __restrict y, const uint16_t* __restrict streams, const float* __restrict post,
            const float* __restrict comb, int64_t n, int64_t d, uint16_t* __restrict out) {
  for (int64_t k = 0; k < n; ++k) {
    const float scale = post[k];
    uint16_t* __restrict row = out + k * d;
    if (n == 4) {
      const float a = comb[k], b = comb[4 + k], c = comb[8 + k], e = comb[12 + k];
      for (int64_t i = 0; i < d; ++i) {
        const float first = a * from_bfloat16(streams[i]) + b * from_bfloat16(streams[d + i]);
        const float mixed = first + c * from_bfloat16(streams[2 * d + i]) + e * from_bfloat16(streams[3 * d + i]);
        row[i] = round_bfloat16(scale * from_bfloat16(y[i]) + mixed);
      }
      continue;
    }
    for (int64_t i = 0; i < d; ++i) {
      float mixed = comb[k] * from_bfloat16(streams[i]);
      for (int64_t j = 1; j < n; ++j) mixed = mixed + comb[j * n + k] * from_bfloat16(streams[j * d + i]);
      row[i] = round_bfloat16(scale * from_bfloat16(y[i]) + mixed);
    }
  }
}

void fuse(const uint16_t* __restrict streams, const uint16_t* __restrict keys_value, const float* __restrict qk_weight,
          int64_t n, int64_t d, float eps, float alive, uint16_t* __restrict out) {
  const float root = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(d)));
  for (int64_t k = 0; k < n; ++k) {
    const uint16_t *x = streams + k * d, *key = keys_value + k * d, *value = keys_value + n * d;
    const float* weight = qk_weight + k * d;
    Eight dots = zero8();
    for (int64_t i = 0; i + 8 <= d; i += 8) {
      double terms[8];
      for (int64_t j = 0; j < 8; ++j) {
        terms[j] = static_cast<double>(from_bfloat16(x[i + j]) * weight[i + j] * from_bfloat16(key[i + j]));
      }
      const Eight term = load8(terms);
      for (int p = 0; p < kParts; ++p) dots.part[p] += term.part[p];
    }
    double sum = sum_lanes(dots);
    for (int64_t i = d / 8 * 8; i < d; ++i) {
      sum += static_cast<double>(from_bfloat16(x[i]) * weight[i] * from_bfloat16(key[i]));
    }
    const float dot =
        static_cast<float>(sum) * inverse_rms_of(Bfloat16s{x}, d, eps) * inverse_rms_of(Bfloat16s{key}, d, eps) * root;
    const float magnitude = __builtin_fabsf(dot) < 1e-6f ? 1e-6f : __builtin_fabsf(dot);
    const float sign = dot > 0.0f ? 1.0f : dot < 0.0f ? -1.0f : 0.0f;
    const double signed_root = static_cast<double>(sign * __builtin_sqrtf(magnitude));
    const float gate = static_cast<float>(sigmoid(all(signed_root))[0]) * alive;
    for (int64_t i = 0; i < d; ++i) {
      out[k * d + i] = round_bfloat16(from_bfloat16(x[i]) + gate * from_bfloat16(value[i]));
    }
  }
}

void dequantize_e4m3(const uint8_t* __restrict codes, const uint8_t* __restrict scales, int64_t count,
                     uint16_t* __restrict out) {
  for (int64_t block = 0; block < count / 32; ++block) {
    const int32_t code = scales[block];
    if (10 <= code && code <= 134) {  // every value is a normal bfloat16, and the scale times 2^120 a float32
      const float factor = as_float((code + 120) << 23);
      for (int64_t i = block * 32; i < block * 32 + 32; ++i) {
        const uint32_t magnitude = codes[i] & 0x7fu;
        const uint32_t value = as_bits(as_float(static_cast<int32_t>(magnitude << 20)) * factor) >> 16;
        out[i] = static_cast<uint16_t>(magnitude == 0x7fu ? 0x7fc0u : value | (codes[i] & 0x80u) << 8);
      }
      continue;
    }
    const float scale = code == 255 ? __builtin_nanf("") : code == 0 ? 0x1p-127f : as_float(code << 23);
    for (int64_t i = block * 32; i < block * 32 + 32; ++i) {
      const uint32_t magnitude = codes[i] & 0x7fu, sign = static_cast<uint32_t>(codes[i] & 0x80u) << 24;
      const float value = as_float(static_cast<int32_t>(magnitude << 20)) * 0x1p+120f;
      const float number = magnitude == 0x7fu ? __builtin_nanf("") : value;
      out[i] = round_bfloat16(as_float(static_cast<int32_t>(as_bits(number) | sign)) * scale);
    }
  }
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
