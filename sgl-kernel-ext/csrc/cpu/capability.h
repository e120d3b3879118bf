// Which build of the hot loops runs: the best level that this CPU has, or a lower one that was asked for.
#pragma once

#include <string>
#include <vector>

namespace sgl_kernel_ext {

enum class CpuLevel { generic = 0, avx2 = 1, avx512 = 2 };

// Levels that this binary holds and this CPU runs, lowest first.
std::vector<std::string> supported_cpu_levels();

// The level in use. The first call reads the environment variable SGL_KERNEL_EXT_CPU, if set.
CpuLevel cpu_level();
std::string cpu_level_name();

// Uses `name` from now on, in all threads; "" goes back to the best level.
// Throws c10::ValueError, naming the supported levels, if `name` is none of them.
void force_cpu_level(const std::string& name);

}  // namespace sgl_kernel_ext
