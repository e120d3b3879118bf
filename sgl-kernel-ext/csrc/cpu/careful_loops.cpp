// One product of a row and a column, as the definition says it, for values that the fast loops are not made for.

#include "simd.h"
#include "stored_loops.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

constexpr float kE2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

float scale_value(uint8_t code) {
  return code == 255 ? __builtin_nanf("") : code == 0 ? 0x1p-127f : as_float(static_cast<int32_t>(code) << 23);
}

float e4m3_value(uint8_t code) {
  if ((code & 0x7f) == 0x7f) {
    return __builtin_nanf("");
  }
  const float magnitude = as_float((code & 0x7f) << 20) * 0x1p+120f;
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

}  // namespace

// rounded_x: the row after rounding to e4m3 and back.
float careful_sum(const uint16_t* rounded_x, const StoredWeight& weight, int64_t column) {
  const int64_t blocks = weight.k / kBlock;
  float total = 0.0f;
  for (int64_t block = 0; block < blocks; ++block) {
    double sum = 0.0;
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; ++i) {
      float value;
      if (weight.is_e2m1) {
        const uint8_t byte = weight.codes[(column * weight.k + i) / 2];
        const uint8_t code = i % 2 == 0 ? byte & 15 : byte >> 4;
        const float magnitude = kE2m1[code & 7] * scale_value(weight.scales[column * blocks + block]);
        value = (code & 8) != 0 ? -magnitude : magnitude;
      } else {
        value = e4m3_value(weight.codes[column * weight.k + i]) *
                scale_value(weight.scales[column / kBlock * blocks + block]);
      }
      sum += static_cast<double>(from_bfloat16(rounded_x[i])) * static_cast<double>(value);
    }
    total += static_cast<float>(sum);
  }
  return total;
}

}  // namespace sgl_kernel_ext::CPU_LEVEL
