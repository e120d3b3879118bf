// E4m3 codes as doubles, sixty-four at a time. Included by *_loops.cpp alone.
#pragma once

#include "simd_bytes.h"

#if defined(__AVX512VBMI__)

namespace sgl_kernel_ext::CPU_LEVEL {
namespace {

constexpr int kCodes = 64;

// Where the bytes of eight doubles come from: 0 to 63 the codes, shifted; from 64 on, their signs.
struct Places {
  alignas(64) uint8_t of[8][kCodes];
};

// neighbours: eight codes side by side; else every eighth, from the first to the eighth one on.
constexpr Places make_places(bool neighbours) {
  Places places{};
  for (int i = 0; i < 8; ++i) {
    for (int byte = 0; byte < kCodes; ++byte) {
      const int code = neighbours ? 8 * i + byte / 8 : byte / 8 * 8 + i;
      places.of[i][byte] = static_cast<uint8_t>(code + (byte % 8 == 7 ? kCodes : 0));
    }
  }
  return places;
}
constexpr Places kNeighbours = make_places(true), kEveryEighth = make_places(false);

// A code makes the two upper bytes of a double, as in load8_e4m3: its sign, and the rest shifted by one.
struct Codes {
  Bytes shifted, signs;

  SGL_KERNEL_EXT_INLINE explicit Codes(Bytes codes)
      : shifted(_mm512_add_epi8(codes, codes)), signs(_mm512_and_si512(codes, _mm512_set1_epi8(-128))) {}

  SGL_KERNEL_EXT_INLINE Doubles eight(Bytes places) const {
    return _mm512_castsi512_pd(_mm512_maskz_permutex2var_epi8(0xc0c0c0c0c0c0c0c0, shifted, places, signs));
  }
};

}  // namespace
}  // namespace sgl_kernel_ext::CPU_LEVEL

#endif
