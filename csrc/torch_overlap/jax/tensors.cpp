#include "torch_overlap/jax/tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::jax {

c10::ScalarType scalar_type(std::string_view op, std::string_view what, ffi::DataType dtype) {
  using enum c10::ScalarType;
  switch (dtype) {
    case ffi::DataType::PRED:
      return Bool;
    case ffi::DataType::S8:
      return Char;
    case ffi::DataType::S16:
      return Short;
    case ffi::DataType::S32:
      return Int;
    case ffi::DataType::S64:
      return Long;
    case ffi::DataType::U8:
      return Byte;
    case ffi::DataType::U16:
      return UInt16;
    case ffi::DataType::U32:
      return UInt32;
    case ffi::DataType::U64:
      return UInt64;
    case ffi::DataType::F16:
      return Half;
    case ffi::DataType::BF16:
      return BFloat16;
    case ffi::DataType::F32:
      return Float;
    case ffi::DataType::F64:
      return Double;
    case ffi::DataType::C64:
      return ComplexFloat;
    case ffi::DataType::C128:
      return ComplexDouble;
    case ffi::DataType::F8E4M3FN:
      return Float8_e4m3fn;
    case ffi::DataType::F8E5M2:
      return Float8_e5m2;
    case ffi::DataType::F8E4M3FNUZ:
      return Float8_e4m3fnuz;
    case ffi::DataType::F8E5M2FNUZ:
      return Float8_e5m2fnuz;
    case ffi::DataType::F8E8M0FNU:
      return Float8_e8m0fnu;
    default:
      fail(ErrorKind::kType, op, ": expected ", what,
           " of a dtype that torch has, got XLA's type number ", static_cast<int>(dtype),
           ". Convert it with astype().");
  }
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
