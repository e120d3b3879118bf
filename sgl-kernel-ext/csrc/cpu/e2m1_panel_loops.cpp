// Products with packed e2m1 weights for many rows: a block of weights is turned into a panel once, columns in lanes, so
// that a row's sums need no shuffling. Compiled once per CPU level; see e4m3_block_loops.cpp for what that forbids, and
// e2m1_layout.h for why the sums are exact.

#include "e2m1_layout.h"
#include "simd_bytes.h"

namespace sgl_kernel_ext::CPU_LEVEL {

#if defined(__AVX512VNNI__)

namespace {

constexpr int kColumns = kTile;
constexpr int kSteps = 4;  // of four bytes of each column's block

// even[s], odd[s]: for each column four weights, of the low and high nibbles of bytes 4s .. 4s + 3.
struct Panel {
  Bytes even[kSteps], odd[kSteps];
  Bytes exponents;
};

Panel make_panel(const uint8_t* codes, int64_t codes_stride, const uint8_t* scales, int64_t scales_stride) {
  alignas(64) uint8_t turned[kSteps][64];
  int32_t exponents[kColumns];
  turn_rows(codes, codes_stride, turned);
  for (int c = 0; c < kColumns; ++c) exponents[c] = scales[c * scales_stride];
  Panel panel;
  for (int s = 0; s < kSteps; ++s) {
    const EvenOdd weights = unpack(load_bytes(turned[s]));
    panel.even[s] = weights.even;
    panel.odd[s] = weights.odd;
  }
  panel.exponents = load_bytes(exponents);
  return panel;
}

// One digit of a row's block by the panel: a sum per column.
SGL_KERNEL_EXT_INLINE Bytes digit_sums(const Panel& panel, const uint8_t* digits) {
  Bytes even = V(setzero_si512)(), odd = V(setzero_si512)();
  for (int s = 0; s < kSteps; ++s) {
    even = add_dots(even, panel.even[s], four_bytes(digits + 4 * s));
    odd = add_dots(odd, panel.odd[s], four_bytes(digits + kGroupBytes + 4 * s));
  }
  return V(add_epi32)(even, odd);
}

SGL_KERNEL_EXT_INLINE void add_block(const Panel& panel, const uint8_t* row, int lane, float* total) {
  const uint8_t* digits = row + lane * kBlockBytes;
  const GroupTail* tail = reinterpret_cast<const GroupTail*>(row + kDigits * kDigitBytes);
  const Bytes high = V(slli_epi32)(digit_sums(panel, digits), 8);
  Bytes sum = V(slli_epi32)(V(add_epi32)(high, digit_sums(panel, digits + kDigitBytes)), 3);
  if (tail->has_fine != 0) {
    sum = V(add_epi32)(sum, digit_sums(panel, digits + 2 * kDigitBytes));
  }
  sum = V(sub_epi32)(sum, V(set1_epi32)(tail->sums[lane]));
  Singles before;
  __builtin_memcpy(&before, total, sizeof(before));
  const Singles after = before + times_power(sum, V(add_epi32)(panel.exponents, V(set1_epi32)(tail->exponents[lane])));
  __builtin_memcpy(total, &after, sizeof(after));
}

}  // namespace

void multiply_panel(const uint8_t* packed, int64_t row_bytes, const int32_t* rows, int64_t num_rows,
                    const GroupWeights& group, float* total) {
  for (int lane = 0; lane < kGroup; ++lane) {
    const Panel panel =
        make_panel(group.codes + lane * kBlockBytes, group.codes_stride, group.scales + lane, group.scales_stride);
    for (int64_t r = 0; r < num_rows; ++r) {
      add_block(panel, packed + rows[r] * row_bytes, lane, total + r * kTile);
    }
  }
}

#endif

}  // namespace sgl_kernel_ext::CPU_LEVEL
