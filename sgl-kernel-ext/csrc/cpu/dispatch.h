// The build of a hot loop that runs: SGL_KERNEL_EXT_CHOOSE(loop) is a pointer to it.
#pragma once

#include "capability.h"

namespace sgl_kernel_ext {

template <typename Loop>
Loop choose(CpuLevel level, Loop generic, [[maybe_unused]] Loop avx2, [[maybe_unused]] Loop avx512) {
  switch (level) {
    case CpuLevel::avx512:
      return avx512;
    case CpuLevel::avx2:
      return avx2;
    default:
      return generic;
  }
}

#if defined(__x86_64__)
#define SGL_KERNEL_EXT_CHOOSE_AT(level, loop)                                                      \
  ::sgl_kernel_ext::choose(level, &::sgl_kernel_ext::generic::loop, &::sgl_kernel_ext::avx2::loop, \
                           &::sgl_kernel_ext::avx512::loop)
#else
#define SGL_KERNEL_EXT_CHOOSE_AT(level, loop) (&::sgl_kernel_ext::generic::loop)
#endif
#define SGL_KERNEL_EXT_CHOOSE(loop) SGL_KERNEL_EXT_CHOOSE_AT(::sgl_kernel_ext::cpu_level(), loop)

}  // namespace sgl_kernel_ext
