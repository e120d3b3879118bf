#include "capability.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <array>
#include <atomic>
#include <cstdlib>

namespace sgl_kernel_ext {
namespace {

constexpr std::array<const char*, 3> kNames = {"generic", "avx2", "avx512"};

CpuLevel best_level() {
#if defined(__x86_64__)
  // The features must be those that CMakeLists.txt compiles each level with.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
      __builtin_cpu_supports("avx512vbmi")) {
    return CpuLevel::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return CpuLevel::avx2;
  }
#endif
  return CpuLevel::generic;
}

CpuLevel parse_level(const std::string& name) {
  const auto supported = supported_cpu_levels();
  for (size_t i = 0; i < supported.size(); ++i) {
    if (supported[i] == name) {
      return static_cast<CpuLevel>(i);
    }
  }
  TORCH_CHECK_VALUE(false, "CPU level '", name, "' is not supported here; use one of: ", c10::Join(", ", supported));
}

CpuLevel initial_level() {
  const char* name = std::getenv("SGL_KERNEL_EXT_CPU");
  return name != nullptr && *name != '\0' ? parse_level(name) : best_level();
}

std::atomic<CpuLevel>& current_level() {
  static std::atomic<CpuLevel> level{initial_level()};
  return level;
}

}  // namespace

std::vector<std::string> supported_cpu_levels() {
  return {kNames.begin(), kNames.begin() + static_cast<int>(best_level()) + 1};
}

CpuLevel cpu_level() { return current_level().load(std::memory_order_relaxed); }

std::string cpu_level_name() { return kNames[static_cast<size_t>(cpu_level())]; }

void force_cpu_level(const std::string& name) {
  const CpuLevel level = name.empty() ? best_level() : parse_level(name);
  current_level().store(level, std::memory_order_relaxed);
}

}  // namespace sgl_kernel_ext
