// exp and its like on vectors of doubles. Included by *_loops.cpp alone. No step may be fused, so all levels give the
// same bits; the error is below 1 unit in the last place, as that of the libraries behind torch.
#pragma once

#include "simd.h"

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

typedef int64_t Longs __attribute__((vector_size(8 * kLanes)));

// e^x; 0 below -708 and infinite above 709.
SGL_KERNEL_EXT_INLINE Doubles exp(Doubles x) {
  constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  constexpr double kRounder = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
  const Doubles bounded = x < all(-708.0) ? all(-708.0) : x > all(709.0) ? all(709.0) : x;
  const Doubles shifted = bounded * all(1.44269504088896338700) + all(kRounder);
  const Doubles n = shifted - all(kRounder);
  const Doubles r =
      (bounded - n * all(kLn2High)) - n * all(kLn2Low);  // |r| < 0.35, so 13 terms of the series are enough
  constexpr double kSeries[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        1.0 / 2.0};
  Doubles sum = all(kSeries[0]);
  for (int i = 1; i < 12; ++i) sum = sum * r + all(kSeries[i]);
  const Doubles mantissa = all(1.0) + (r + r * r * sum);
  const Longs exponent = (__builtin_bit_cast(Longs, shifted) << 52) + (Longs{} + (int64_t{1023} << 52));
  const Doubles value = mantissa * __builtin_bit_cast(Doubles, exponent);
  const Doubles low = x < all(-708.0) ? Doubles{} : value;
  const Doubles high = x > all(709.0) ? all(__builtin_inf()) : low;
  return x == x ? high : x;
}

SGL_KERNEL_EXT_INLINE Doubles sigmoid(Doubles x) { return all(1.0) / (all(1.0) + exp(-x)); }

}  // namespace
}  // namespace sgl_kernel_ext::CPU_LEVEL
