// Products with e4m3 weights for some rows: a block of weights is decoded into a panel once, columns in lanes. Compiled
// once per CPU level; see e4m3_block_loops.cpp for what that forbids, and e4m3_layout.h for why the sums are exact.

#include "e4m3_decode.h"

namespace sgl_kernel_ext::CPU_LEVEL {

#if defined(__AVX2__)

namespace {

constexpr int kSteps = kBlock / 4;          // of four inputs
constexpr int kStepVectors = 2 * kVectors;  // sixteen columns by four inputs, as int16
constexpr int kHalf = static_cast<int>(sizeof(Bytes));

struct Panel {
  Bytes weights[kSteps][kStepVectors];
};

// Vectors 2i and 2i + 1 of a step hold columns in turns of two (0, 1, 4, 5, ... and 2, 3, 6, 7, ...), which `join`
// undoes.
bool make_panel(const uint8_t* codes, int64_t stride, Panel* panel, FineWeights* fine) {
  alignas(64) uint8_t turned[kSteps][64];
  turn_rows(codes, stride, turned);
  turn_rows(codes + 16, stride, turned + 4);
  Bytes least = V(set1_epi8)(-1);
  for (int s = 0; s < kSteps; ++s) {
    for (int v = 0; v < kVectors; ++v) {
      const Bytes step = load_bytes(turned[s] + v * kHalf);
      const Coarse weights = coarse_weights(step);
      least = V(min_epu8)(least, magnitude_class(step));
      panel->weights[s][2 * v] = weights.first;
      panel->weights[s][2 * v + 1] = weights.second;
    }
  }
  fine->count = 0;
  return !any_below_coarse(least) || find_fine(codes, stride, 0, kTile, fine);
}

// Two sums per column, of two inputs each, to one.
SGL_KERNEL_EXT_INLINE Bytes join(Bytes a, Bytes b) {
#if defined(__AVX512BW__)
  const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
  return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)),
                          _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
#else
  return _mm256_hadd_epi32(a, b);
#endif
}

SGL_KERNEL_EXT_INLINE void digit_sums(const Panel& panel, const int16_t* digits, Bytes* out) {
  Bytes sums[kStepVectors] = {};
  for (int s = 0; s < kSteps; ++s) {
    int64_t four;
    __builtin_memcpy(&four, digits + 4 * s, 8);
    const Bytes input = all_of_eight_bytes(four);
    for (int v = 0; v < kStepVectors; ++v) sums[v] = add_pairs(sums[v], panel.weights[s][v], input);
  }
  for (int v = 0; v < kVectors; ++v) out[v] = join(sums[2 * v], sums[2 * v + 1]);
}

}  // namespace

bool multiply_panel(const uint8_t* packed, const int32_t* rows, int64_t num_rows, const uint8_t* codes, int64_t k,
                    int64_t block, const int32_t* weight_scales, float* total) {
  Panel panel;
  FineWeights fine;
  if (!make_panel(codes, k, &panel, &fine)) {
    return false;
  }
  for (int64_t r = 0; r < num_rows; ++r, total += kTile) {
    const PackedRow row(packed + rows[r] * PackedRow::nbytes(k), k);
    const int16_t *high = row.high + block * kBlock, *low = row.low + block * kBlock;
    const BlockInfo info = row.blocks[block];
    Bytes sums[2][kVectors] = {};
    digit_sums(panel, high, sums[0]);
    if (info.has_low) {
      digit_sums(panel, low, sums[1]);
    }
    finish_block(sums, fine, high, low, info, weight_scales, total);
  }
  return true;
}

#endif

}  // namespace sgl_kernel_ext::CPU_LEVEL
