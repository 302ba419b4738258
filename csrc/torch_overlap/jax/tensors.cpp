#include "torch_overlap/jax/tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <utility>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::jax {

c10::ScalarType scalar_type(std::string_view op, std::string_view what, ffi::DataType dtype) {
  using Xla = ffi::DataType;
  using enum c10::ScalarType;
  static constexpr std::pair<Xla, c10::ScalarType> kTypes[] = {
      {Xla::PRED, Bool},
      {Xla::S8, Char},
      {Xla::S16, Short},
      {Xla::S32, Int},
      {Xla::S64, Long},
      {Xla::U8, Byte},
      {Xla::U16, UInt16},
      {Xla::U32, UInt32},
      {Xla::U64, UInt64},
      {Xla::F16, Half},
      {Xla::BF16, BFloat16},
      {Xla::F32, Float},
      {Xla::F64, Double},
      {Xla::C64, ComplexFloat},
      {Xla::C128, ComplexDouble},
      {Xla::F8E4M3FN, Float8_e4m3fn},
      {Xla::F8E5M2, Float8_e5m2},
      {Xla::F8E4M3FNUZ, Float8_e4m3fnuz},
      {Xla::F8E5M2FNUZ, Float8_e5m2fnuz},
      {Xla::F8E8M0FNU, Float8_e8m0fnu},
  };
  for (const auto& [xla, type] : kTypes) {
    if (xla == dtype) return type;
  }
  fail(ErrorKind::kType, op, ": expected ", what,
       " of a dtype that torch has, got XLA's type number ", static_cast<int>(dtype),
       ". Convert it with astype().");
}

at::Tensor as_tensor(std::string_view op, std::string_view what, const ffi::AnyBuffer& buffer,
                     c10::Device device) {
  const auto dimensions = buffer.dimensions();
  const at::IntArrayRef sizes(dimensions.begin(), dimensions.size());
  const auto options =
      at::TensorOptions().dtype(scalar_type(op, what, buffer.element_type())).device(device);
  if (buffer.element_count() == 0) return at::empty(sizes, options);
  return at::from_blob(buffer.untyped_data(), sizes, options);
}

std::optional<at::Tensor> as_optional(std::string_view op, std::string_view what,
                                      const ffi::AnyBuffer& buffer, c10::Device device) {
  if (buffer.element_count() == 0) return std::nullopt;
  return as_tensor(op, what, buffer, device);
}

}  // namespace torch_overlap::jax
