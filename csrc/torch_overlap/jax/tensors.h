#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "torch_overlap/jax/ffi.h"

// XLA's buffers as tensors, without a copy. They live as long as the call.
namespace torch_overlap::jax {

// Throws kType, naming `what`, if torch has no such dtype.
c10::ScalarType scalar_type(std::string_view op, std::string_view what, ffi::DataType dtype);
at::Tensor as_tensor(std::string_view op, std::string_view what, const ffi::AnyBuffer& buffer,
                     c10::Device device);
// Returns nothing for a buffer without elements: XLA has no optional operands.
std::optional<at::Tensor> as_optional(std::string_view op, std::string_view what,
                                      const ffi::AnyBuffer& buffer, c10::Device device);

}  // namespace torch_overlap::jax
