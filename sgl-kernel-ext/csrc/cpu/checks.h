// Checks of op arguments. Every message names the op, the argument, and the shape and dtype that were found.
#pragma once

#include <ATen/core/Tensor.h>

namespace sgl_kernel_ext {

inline void check_dtype(const char* op, const char* name, const at::Tensor& x, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(x.scalar_type() == dtype, op, ": ", name, " must be ",
                   dtype == at::kBFloat16 ? "bfloat16" : c10::toString(dtype), ", got ", x.scalar_type(), " of shape ",
                   x.sizes());
}

inline void check_contiguous(const char* op, const char* name, const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.is_contiguous(), op, ": ", name, " must be contiguous, got shape ", x.sizes(), " with strides ",
                    x.strides(), " of ", x.scalar_type());
}

inline void check(const char* op, const char* name, const at::Tensor& x, at::ScalarType dtype, int64_t dim) {
  check_dtype(op, name, x, dtype);
  TORCH_CHECK_VALUE(x.dim() == dim, op, ": ", name, " must have ", dim, " dimensions, got shape ", x.sizes(), " of ",
                    x.scalar_type());
  check_contiguous(op, name, x);
}

inline void check_shape(const char* op, const char* name, const at::Tensor& x, at::IntArrayRef shape) {
  TORCH_CHECK_VALUE(x.sizes() == shape, op, ": ", name, " must have shape ", shape, ", got ", x.sizes(), " of ",
                    x.scalar_type());
}

// Whether the rows of `x` are records of bfloat16, two bytes for each of `dim` values, and not of `packed` bytes.
inline bool holds_bfloat16(const char* op, const char* name, const at::Tensor& x, int64_t packed, int64_t dim) {
  const int64_t rows = x.size(0), width = x.size(1);
  TORCH_CHECK_VALUE(width == packed || width == 2 * dim, op, ": ", name, " must have shape [", rows, ", ", packed,
                    "], or [", rows, ", ", 2 * dim, "] as bfloat16, got ", x.sizes(), " of ", x.scalar_type());
  return width != packed;
}

inline const uint16_t* bfloat16_bits(const at::Tensor& x) { return static_cast<const uint16_t*>(x.const_data_ptr()); }
inline uint16_t* mutable_bfloat16_bits(at::Tensor& x) { return static_cast<uint16_t*>(x.mutable_data_ptr()); }
inline const uint8_t* bytes(const at::Tensor& x) { return static_cast<const uint8_t*>(x.const_data_ptr()); }

inline uint16_t to_bfloat16_bits(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return 0x7fc0;
  }
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_bfloat16_bits(uint16_t bits) { return __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16); }

}  // namespace sgl_kernel_ext
