#pragma once

#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Where an Error leaves the library through torch's dispatcher: torch hands its own exceptions on
// to the caller's language, and makes a plain RuntimeError of any other. So bindings name the
// function that throws torch's counterpart of an Error. In a C++ program there is none, and an
// Error stays one.
using ThrowCounterpart = void (*)(const Error&);
TORCH_OVERLAP_API void set_throw_counterpart(ThrowCounterpart throw_counterpart);

// Throws what `caught`, the Error being handled, leaves as.
[[noreturn]] TORCH_OVERLAP_API void leave(const Error& caught);

// What `call` returns, or its Error as it leaves the library.
template <typename F>
decltype(auto) at_boundary(F&& call) {
  try {
    return std::forward<F>(call)();
  } catch (const Error& error) {
    leave(error);
  }
}

}  // namespace torch_overlap
