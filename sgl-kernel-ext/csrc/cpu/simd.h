// Vectors of doubles of the CPU level that a hot loop is compiled for. Included by *_loops.cpp alone, and holds no
// library code, for the reason given in e4m3_block_loops.cpp.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define SGL_KERNEL_EXT_INLINE inline __attribute__((always_inline))

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 8;
#elif defined(__AVX2__)
constexpr int kLanes = 4;
#else
constexpr int kLanes = 2;
#endif

typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));

// Eight doubles at every level, so that a sum is made of the same eight partial sums everywhere.
constexpr int kParts = 8 / kLanes;
struct Eight {
  Doubles part[kParts];
};

SGL_KERNEL_EXT_INLINE float as_float(int32_t bits) { return __builtin_bit_cast(float, bits); }
SGL_KERNEL_EXT_INLINE uint32_t as_bits(float value) { return __builtin_bit_cast(uint32_t, value); }
SGL_KERNEL_EXT_INLINE double power_of_two(int64_t exponent) {  // of a normal double
  return __builtin_bit_cast(double, (exponent + 1023) << 52);
}

SGL_KERNEL_EXT_INLINE float from_bfloat16(uint16_t bits) { return as_float(static_cast<int32_t>(bits) << 16); }

// Nearest even; a NaN becomes the one that torch writes.
SGL_KERNEL_EXT_INLINE uint16_t to_bfloat16(float value) {
  const uint32_t bits = as_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return 0x7fc0;
  }
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// The same without a branch, so that loops over it are vectorised.
SGL_KERNEL_EXT_INLINE uint16_t round_bfloat16(float value) {
  const uint32_t bits = as_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

SGL_KERNEL_EXT_INLINE Doubles load(const double* p) {
  Doubles value;
  __builtin_memcpy(&value, p, sizeof(value));
  return value;
}

SGL_KERNEL_EXT_INLINE void store(double* p, Doubles value) { __builtin_memcpy(p, &value, sizeof(value)); }

SGL_KERNEL_EXT_INLINE Doubles all(double value) {
#if defined(__AVX512F__)
  return _mm512_set1_pd(value);
#elif defined(__AVX2__)
  return _mm256_set1_pd(value);
#else
  return Doubles{value, value};
#endif
}

// Where it is used, the product is exact, so that fusing it with the addition changes no bit.
SGL_KERNEL_EXT_INLINE Doubles add_product(Doubles sum, Doubles a, Doubles b) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, sum);
#elif defined(__FMA__)
  return _mm256_fmadd_pd(a, b, sum);
#else
  return a * b + sum;
#endif
}

SGL_KERNEL_EXT_INLINE Eight zero8() {
  Eight value;
  for (int i = 0; i < kParts; ++i) value.part[i] = Doubles{};
  return value;
}

SGL_KERNEL_EXT_INLINE Eight load8(const double* p) {
  Eight value;
  for (int i = 0; i < kParts; ++i) value.part[i] = load(p + i * kLanes);
  return value;
}

SGL_KERNEL_EXT_INLINE void store8(double* p, const Eight& value) {
  for (int i = 0; i < kParts; ++i) store(p + i * kLanes, value.part[i]);
}

SGL_KERNEL_EXT_INLINE void add_product8(Eight& sum, const Eight& a, const Eight& b) {
  for (int i = 0; i < kParts; ++i) sum.part[i] = add_product(sum.part[i], a.part[i], b.part[i]);
}

// The sums of the eight lanes of four (eight) vectors. Always ((0+1) + (4+5)) + ((2+3) + (6+7)).
#if defined(__AVX512F__)
SGL_KERNEL_EXT_INLINE __m512d add_neighbours(__m512d a, __m512d b) {
  return _mm512_unpacklo_pd(a, b) + _mm512_unpackhi_pd(a, b);
}
SGL_KERNEL_EXT_INLINE void sum_lanes4(const Eight* x, double* out) {
  const __m512d ab = add_neighbours(x[0].part[0], x[1].part[0]), cd = add_neighbours(x[2].part[0], x[3].part[0]);
  const __m512d half = _mm512_shuffle_f64x2(ab, cd, 0x44) + _mm512_shuffle_f64x2(ab, cd, 0xee);
  const __m256d low = _mm512_castpd512_pd256(half), high = _mm512_extractf64x4_pd(half, 1);
  _mm256_storeu_pd(out, _mm256_permute2f128_pd(low, high, 0x20) + _mm256_permute2f128_pd(low, high, 0x31));
}
SGL_KERNEL_EXT_INLINE Eight sum_lanes8(const Eight* x) {
  const __m512d ab = add_neighbours(x[0].part[0], x[1].part[0]), cd = add_neighbours(x[2].part[0], x[3].part[0]);
  const __m512d ef = add_neighbours(x[4].part[0], x[5].part[0]), gh = add_neighbours(x[6].part[0], x[7].part[0]);
  const __m512d abcd = _mm512_shuffle_f64x2(ab, cd, 0x44) + _mm512_shuffle_f64x2(ab, cd, 0xee);
  const __m512d efgh = _mm512_shuffle_f64x2(ef, gh, 0x44) + _mm512_shuffle_f64x2(ef, gh, 0xee);
  return {{_mm512_shuffle_f64x2(abcd, efgh, 0x88) + _mm512_shuffle_f64x2(abcd, efgh, 0xdd)}};
}
#elif defined(__AVX2__)
SGL_KERNEL_EXT_INLINE __m256d add_neighbours(const Eight& a, const Eight& b) {
  return (_mm256_unpacklo_pd(a.part[0], b.part[0]) + _mm256_unpackhi_pd(a.part[0], b.part[0])) +
         (_mm256_unpacklo_pd(a.part[1], b.part[1]) + _mm256_unpackhi_pd(a.part[1], b.part[1]));
}
SGL_KERNEL_EXT_INLINE __m256d sum_lanes_of_four(const Eight* x) {
  const __m256d ab = add_neighbours(x[0], x[1]), cd = add_neighbours(x[2], x[3]);
  return _mm256_permute2f128_pd(ab, cd, 0x20) + _mm256_permute2f128_pd(ab, cd, 0x31);
}
SGL_KERNEL_EXT_INLINE void sum_lanes4(const Eight* x, double* out) { _mm256_storeu_pd(out, sum_lanes_of_four(x)); }
SGL_KERNEL_EXT_INLINE Eight sum_lanes8(const Eight* x) { return {{sum_lanes_of_four(x), sum_lanes_of_four(x + 4)}}; }
#else
SGL_KERNEL_EXT_INLINE double sum_lanes1(const Eight& x) {
  const auto pair = [&](int i) { return x.part[i][0] + x.part[i][1]; };
  return (pair(0) + pair(2)) + (pair(1) + pair(3));
}
SGL_KERNEL_EXT_INLINE void sum_lanes4(const Eight* x, double* out) {
  for (int i = 0; i < 4; ++i) out[i] = sum_lanes1(x[i]);
}
SGL_KERNEL_EXT_INLINE Eight sum_lanes8(const Eight* x) {
  double sums[8];
  for (int i = 0; i < 8; ++i) sums[i] = sum_lanes1(x[i]);
  return load8(sums);
}
#endif

// -- eight weights as doubles -----------------------------------------------------------------------------------------

constexpr int kE4m3Shift = 1016;  // load8_e4m3 gives the value times 2^-1016

// The seven bits below the sign become exponent and mantissa of a double as they are, subnormals too. Code 0x7f, a NaN,
// comes out as a number: callers look for it first.
SGL_KERNEL_EXT_INLINE Eight load8_e4m3(const uint8_t* codes) {
  Eight value;
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtepi8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  value.part[0] = _mm512_castsi512_pd(
      _mm512_and_si512(_mm512_slli_epi64(wide, 49), _mm512_set1_epi64(static_cast<int64_t>(0x80ffffffffffffffull))));
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i) {
    int32_t four;
    __builtin_memcpy(&four, codes + 4 * i, 4);
    const __m256i wide = _mm256_slli_epi64(_mm256_cvtepi8_epi64(_mm_cvtsi32_si128(four)), 49);
    value.part[i] =
        _mm256_castsi256_pd(_mm256_and_si256(wide, _mm256_set1_epi64x(static_cast<int64_t>(0x80ffffffffffffffull))));
  }
#else
  for (int i = 0; i < 8; ++i) {
    const uint64_t bits =
        (static_cast<uint64_t>(codes[i] & 0x80) << 56) | (static_cast<uint64_t>(codes[i] & 0x7f) << 49);
    value.part[i / kLanes][i % kLanes] = __builtin_bit_cast(double, bits);
  }
#endif
  return value;
}

SGL_KERNEL_EXT_INLINE Eight load8_bfloat16(const uint16_t* p) {
  Eight value;
#if defined(__AVX512F__)
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  value.part[0] = _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
#elif defined(__AVX2__)
  for (int i = 0; i < 2; ++i) {
    const __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 4 * i)));
    value.part[i] = _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(wide, 16)));
  }
#else
  for (int i = 0; i < 8; ++i) value.part[i / kLanes][i % kLanes] = from_bfloat16(p[i]);
#endif
  return value;
}

SGL_KERNEL_EXT_INLINE Eight load8_float(const float* p) {
  Eight value;
  for (int i = 0; i < kParts; ++i) {
    Floats narrow;
    __builtin_memcpy(&narrow, p + i * kLanes, sizeof(narrow));
    value.part[i] = __builtin_convertvector(narrow, Doubles);
  }
  return value;
}

}  // namespace
}  // namespace sgl_kernel_ext::CPU_LEVEL
