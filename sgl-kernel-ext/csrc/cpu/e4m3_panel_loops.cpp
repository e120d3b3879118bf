// Products with e4m3 weights for many rows, in integers: a block of weights is turned into a panel once, columns in
// lanes. Compiled once per CPU level; see e4m3_block_loops.cpp for what that forbids.
//
// Inputs and weights are integers below 2^18 (codes times 2^9): 8 * coarse + fine, where fine is 0 but for values below
// 1/3584 of the largest. sum(a * w) = 64 * sum(coarse_a * coarse_w) + corrections. The first sum is made of bytes: with
// u = coarse_w + 32768 = 256 * u1 + u0 and coarse_a = 256 * high + low, four sums of byte products, each below
// 32 * 255 * 128 < 2^20; they are put together in float64, where all of it is exact (below 2^41, in steps of 1/64).

#include "e4m3_layout.h"
#include "simd_bytes.h"

namespace sgl_kernel_ext::CPU_LEVEL {

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

namespace {

constexpr int kSteps = kBlock / 4;  // of four inputs

struct ByteTables {
  alignas(64) uint8_t high[256];
  alignas(64) uint8_t low[256];
  alignas(64) uint8_t fine[256];
};

constexpr ByteTables make_tables() {
  ByteTables tables{};
  for (int code = 0; code < 256; ++code) {
    // The two NaN codes would not fit; they never get here.
    const Digits digits = digits_of((code & 0x7f) == 0x7f ? 0 : kE4m3Times512.value[code]);
    tables.high[code] = static_cast<uint8_t>((digits.coarse + 32768) >> 8);
    tables.low[code] = static_cast<uint8_t>((digits.coarse + 32768) & 255);
    tables.fine[code] = static_cast<uint8_t>(digits.fine);
  }
  return tables;
}
constexpr ByteTables kTables = make_tables();

SGL_KERNEL_EXT_INLINE Bytes look_up(const uint8_t* table, Bytes codes) {
  const Bytes positive = _mm512_permutex2var_epi8(load_bytes(table), codes, load_bytes(table + 64));
  const Bytes negative = _mm512_permutex2var_epi8(load_bytes(table + 128), codes, load_bytes(table + 192));
  return _mm512_mask_mov_epi8(positive, _mm512_movepi8_mask(codes), negative);
}

// More fine parts among a block's 512 weights than this cost more than they are worth; well-scaled weights have one or
// two.
constexpr int kMostFine = 12;

struct FineWeight {
  uint8_t column, input;
  int8_t value;
};

struct Panel {
  Bytes high[kSteps], low[kSteps];
  FineWeight fine[kMostFine];
  int num_fine;
};

// False if there are too many fine parts.
bool make_panel(const uint8_t* codes, int64_t stride, Panel* panel) {
  alignas(64) uint8_t turned[kSteps][64], fine[64];
  turn_rows(codes, stride, turned);
  turn_rows(codes + 16, stride, turned + 4);
  panel->num_fine = 0;
  for (int s = 0; s < kSteps; ++s) {
    const Bytes step = load_bytes(turned[s]), rest = look_up(kTables.fine, step);
    panel->high[s] = look_up(kTables.high, step);
    panel->low[s] = look_up(kTables.low, step);
    uint64_t places = _mm512_test_epi8_mask(rest, rest);
    store_bytes(fine, rest);
    if (panel->num_fine + __builtin_popcountll(places) > kMostFine) {
      return false;
    }
    for (; places != 0; places &= places - 1) {
      const int place = __builtin_ctzll(places);
      panel->fine[panel->num_fine++] = {static_cast<uint8_t>(place / 4), static_cast<uint8_t>(4 * s + place % 4),
                                        static_cast<int8_t>(fine[place])};
    }
  }
  return true;
}

// The coarse parts of input i's sixteen weights.
SGL_KERNEL_EXT_INLINE Bytes coarse_weights(const Panel& panel, int i) {
  const __m128i shift = _mm_cvtsi32_si128(8 * (i % 4));
  const Bytes byte = _mm512_set1_epi32(255);
  const Bytes high = VB (and)(_mm512_srl_epi32(panel.high[i / 4], shift), byte);
  const Bytes low = VB (and)(_mm512_srl_epi32(panel.low[i / 4], shift), byte);
  return V(sub_epi32)(VB(or)(V(slli_epi32)(high, 8), low), _mm512_set1_epi32(32768));
}

// Adds to two times eight sums, in units of 64, what fine parts make of them.
SGL_KERNEL_EXT_INLINE void add_corrections(const Panel& panel, const IntegerBlock& x, __m512d* sums) {
  const auto add_to_column = [&](int column, double value) __attribute__((always_inline)) {
    const int places = 1 << column;
    sums[0] = _mm512_mask_add_pd(sums[0], static_cast<__mmask8>(places), sums[0], _mm512_set1_pd(value));
    sums[1] = _mm512_mask_add_pd(sums[1], static_cast<__mmask8>(places >> 8), sums[1], _mm512_set1_pd(value));
  };
  for (int i = 0; i < panel.num_fine; ++i) {  // all of the input by the weight's fine part
    const FineWeight& weight = panel.fine[i];
    const int input = weight.input, whole = 8 * (256 * x.high[input] + x.low[input]) + x.fine[input];
    add_to_column(weight.column, whole * weight.value * 0x1p-6);
  }
  if (x.has_fine == 0) {
    return;
  }
  const __m256i fine = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x.fine));
  for (uint32_t places = _mm256_test_epi8_mask(fine, fine); places != 0; places &= places - 1) {
    const int i = __builtin_ctz(places);  // the input's fine part by the weight's coarse part
    const Bytes weights = coarse_weights(panel, i);
    const __m512d factor = _mm512_set1_pd(x.fine[i] * 0.125);
    sums[0] = _mm512_fmadd_pd(_mm512_cvtepi32_pd(_mm512_castsi512_si256(weights)), factor, sums[0]);
    sums[1] = _mm512_fmadd_pd(_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(weights, 1)), factor, sums[1]);
  }
}

SGL_KERNEL_EXT_INLINE __m256 rounded_half(__m256i high, __m256i rest, __m512d corrections, __m512d scale) {
  const __m512d sum = _mm512_fmadd_pd(_mm512_cvtepi32_pd(high), _mm512_set1_pd(65536.0), _mm512_cvtepi32_pd(rest));
  return _mm512_cvtpd_ps((sum + corrections) * scale);
}

SGL_KERNEL_EXT_INLINE void add_block(const Panel& panel, const IntegerBlock& x, double scale, float* total) {
  Bytes sums[4] = {};
  for (int s = 0; s < kSteps; ++s) {
    const Bytes high = four_bytes(reinterpret_cast<const uint8_t*>(x.high) + 4 * s);
    const Bytes low = four_bytes(reinterpret_cast<const uint8_t*>(x.low) + 4 * s);
    sums[0] = add_dots(sums[0], panel.high[s], high);
    sums[1] = add_dots(sums[1], panel.low[s], high);
    sums[2] = add_dots(sums[2], panel.high[s], low);
    sums[3] = add_dots(sums[3], panel.low[s], low);
  }
  const Bytes rest = V(add_epi32)(V(slli_epi32)(V(add_epi32)(sums[1], sums[2]), 8), sums[3]);
  __m512d corrections[2] = {_mm512_set1_pd(x.offset), _mm512_set1_pd(x.offset)};
  if (panel.num_fine != 0 || x.has_fine != 0) {
    add_corrections(panel, x, corrections);
  }
  const __m512d factor = _mm512_set1_pd(scale);
  const __m256 first =
      rounded_half(_mm512_castsi512_si256(sums[0]), _mm512_castsi512_si256(rest), corrections[0], factor);
  const __m256 second =
      rounded_half(_mm512_extracti64x4_epi64(sums[0], 1), _mm512_extracti64x4_epi64(rest, 1), corrections[1], factor);
  const __m512 both = _mm512_insertf32x8(_mm512_castps256_ps512(first), second, 1);
  _mm512_storeu_ps(total, _mm512_loadu_ps(total) + both);
}

}  // namespace

bool multiply_integers(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const uint8_t* codes, int64_t k,
                       int64_t block, uint8_t scale_code, float* total) {
  const int64_t blocks = k / kBlock;
  Panel panel;
  if (!make_panel(codes, k, &panel)) {
    return false;
  }
  // Row scales hold 2^16; integers are 2^18 times the product, of which 2^6 is taken out.
  const double weight_scale = power_of_two(scale_code - 127 - 16 - 12);
  for (int64_t r = 0; r < num_rows; ++r) {
    const uint8_t* row = packed + rows[r] * row_bytes(blocks);
    const double scale = reinterpret_cast<const double*>(row + scales_offset())[block] * weight_scale;
    add_block(panel, reinterpret_cast<const IntegerBlock*>(row + integers_offset(blocks))[block], scale,
              total + r * kTile);
  }
  return true;
}

#endif

}  // namespace sgl_kernel_ext::CPU_LEVEL
