// Compiled once per CPU level, with CPU_LEVEL as the namespace and the level's own compiler flags.
//
// Include no library code here: an inline function or template that is instantiated in an AVX-512 build may be the copy
// that the linker keeps for everybody, and then older CPUs die of an illegal instruction.
//
// Everything is integer arithmetic on the bits or fp32 arithmetic whose every step is exact or rounds as the definition
// does, so all levels give the same bits, whatever the vector width.

#include "e4m3_block_loops.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

constexpr int32_t kAbsMask = 0x7fff;
constexpr int32_t kSignMask = 0x8000;
constexpr int32_t kInfinity = 0x7f80;  // of bfloat16; a larger magnitude is a NaN
constexpr int32_t kMaxFinite = 0x7f7f;
constexpr int32_t kCodeNaN = 0x7f;
constexpr int32_t kExponentMask = 0x7f800000;
constexpr int32_t kMinExponent = 127 - 6;  // e4m3's least normal one, biased as in fp32; below it the step stays 2^-9

// Bits are signed, as SSE2 compares no other integers; no sign bit is ever set in what is compared.
inline float as_float(int32_t bits) { return __builtin_bit_cast(float, bits); }
inline int32_t as_bits(float value) { return __builtin_bit_cast(int32_t, value); }
inline int32_t min_of(int32_t a, int32_t b) { return a < b ? a : b; }
inline int32_t max_of(int32_t a, int32_t b) { return a > b ? a : b; }

// 2^ceil(log2(max(amax, 1e-4) / 448)) as a ue8m0 byte. NaNs are skipped, an infinity counts as the largest finite
// value.
inline int32_t block_scale(const uint16_t* __restrict x) {
  int16_t amax = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    const int16_t magnitude = static_cast<int16_t>(x[i] & kAbsMask);
    const int16_t number = magnitude > kInfinity ? int16_t{0} : magnitude;
    amax = number > amax ? number : amax;
  }
  const float bound = as_float(max_of(min_of(amax, kMaxFinite) << 16, as_bits(1e-4f)));
  const int32_t bits = as_bits(bound / 448.0f);
  return (bits >> 23) + ((bits & 0x7fffff) != 0);
}

struct Rounded {
  float value;   // the e4m3 value, >= 0
  int32_t code;  // its code, without sign
};

// Rounds magnitude / scale to e4m3, nearest even, saturating. Adding 2^(e + 20), where e is the exponent of the value,
// makes the fp32 adder round at e4m3's last bit, and leaves the number of steps in the low bits of the sum.
inline Rounded round_e4m3(int32_t magnitude, float inverse_scale) {
  const float scaled = as_float(magnitude << 16) * inverse_scale;
  const float y = as_float(min_of(as_bits(scaled), as_bits(448.0f)));
  const int32_t exponent = max_of(as_bits(y) & kExponentMask, kMinExponent << 23);
  const float shift = as_float(exponent + (20 << 23));
  const float sum = y + shift;
  const int32_t steps = as_bits(sum) - as_bits(shift);
  return {sum - shift, steps + 8 * ((exponent >> 23) - kMinExponent)};
}

}  // namespace

void fake_quant_e4m3(const uint16_t* __restrict x, uint16_t* __restrict out, int64_t blocks) {
  for (int64_t block = 0; block < blocks; ++block, x += kBlock, out += kBlock) {
    const int32_t scale_code = block_scale(x);
    const float scale = as_float(scale_code << 23);
    const float inverse_scale = as_float((254 - scale_code) << 23);
    for (int64_t i = 0; i < kBlock; ++i) {
      const int32_t magnitude = x[i] & kAbsMask;
      // e4m3 has 4 significant bits, so dropping the low half of the fp32 product loses nothing.
      const int32_t product = as_bits(round_e4m3(magnitude, inverse_scale).value * scale) >> 16;
      const int32_t result = magnitude > kInfinity ? magnitude : product;
      out[i] = static_cast<uint16_t>(result | (x[i] & kSignMask));
    }
  }
}

void quantize_e4m3(const uint16_t* __restrict x, uint8_t* __restrict codes, uint8_t* __restrict scales,
                   int64_t blocks) {
  for (int64_t block = 0; block < blocks; ++block, x += kBlock, codes += kBlock) {
    const int32_t scale_code = block_scale(x);
    const float inverse_scale = as_float((254 - scale_code) << 23);
    scales[block] = static_cast<uint8_t>(scale_code);
    for (int64_t i = 0; i < kBlock; ++i) {
      const int32_t magnitude = x[i] & kAbsMask;
      const int32_t rounded = round_e4m3(magnitude, inverse_scale).code;
      const int32_t code = magnitude > kInfinity ? kCodeNaN : rounded;
      codes[i] = static_cast<uint8_t>(code | ((x[i] & kSignMask) >> 8));
    }
  }
}

bool integers_e4m3(const uint16_t* __restrict x, int32_t* __restrict values, uint8_t* __restrict scale) {
  const int32_t scale_code = block_scale(x);
  const float inverse_scale = as_float((254 - scale_code) << 23);
  *scale = static_cast<uint8_t>(scale_code);
  int32_t largest = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    const int32_t magnitude = x[i] & kAbsMask;
    const int32_t value = static_cast<int32_t>(round_e4m3(magnitude, inverse_scale).value * 512.0f);
    values[i] = (x[i] & kSignMask) != 0 ? -value : value;
    largest = max_of(largest, magnitude);
  }
  return largest <= kInfinity;
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
