#pragma once

#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Translates an Error that leaves the library through torch's dispatcher. Torch passes its own
// exceptions on to the caller's language, and makes a plain RuntimeError of any other. Bindings
// therefore register the function that throws torch's counterpart of an Error. A C++ program
// registers none, and an Error stays an Error.
using ExceptionTranslator = void (*)(const Error&);
TORCH_OVERLAP_API void set_exception_translator(ExceptionTranslator translate);

// Throws the translation of `caught`, the Error being handled.
[[noreturn]] TORCH_OVERLAP_API void rethrow_translated(const Error& caught);

// Returns the result of `call`, or throws the translation of its Error.
template <typename F>
decltype(auto) with_exception_translation(F&& call) {
  try {
    return std::forward<F>(call)();
  } catch (const Error& error) {
    rethrow_translated(error);
  }
}

}  // namespace torch_overlap
