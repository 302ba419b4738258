#pragma once

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wreturn-type"  // of XLA's header: switches over all values
#include <xla/ffi/api/ffi.h>
#pragma GCC diagnostic pop

namespace torch_overlap::jax {
namespace ffi = ::xla::ffi;
}  // namespace torch_overlap::jax
