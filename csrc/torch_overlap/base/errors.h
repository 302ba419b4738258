#pragma once

#include <stdexcept>
#include <string>

#include "torch_overlap/base/export.h"
#include "torch_overlap/base/strings.h"

namespace torch_overlap {

// Category of an Error. Python has a class for each, which derives from RuntimeError and, if one
// fits, from the builtin as well (ValueError, TypeError, ...).
enum class ErrorKind {
  kRuntime,      // a library or a peer failed
  kValue,        // a caller's value is wrong: shape, size, rank, name
  kType,         // a caller's type is wrong: dtype, device, a missing factor
  kTimeout,      // a peer did not answer in time
  kUnsupported,  // this backend, dtype or library version cannot do it
  kState,        // used after finalize or abort
  kInterrupted,  // a signal's handler ended a wait: see interrupt.h
};

// The only exception of the library. Form of the message for an invalid argument:
//   <op>: expected <what>, got <value>; <what to do>
class TORCH_OVERLAP_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

template <typename... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  throw Error(kind, concat(parts...));
}

}  // namespace torch_overlap

// Checks `condition`. The message is built only if the condition does not hold.
#define TORCH_OVERLAP_CHECK(condition, kind, ...)                           \
  do {                                                                      \
    if (__builtin_expect(!(condition), 0)) {                                \
      ::torch_overlap::fail(::torch_overlap::ErrorKind::kind, __VA_ARGS__); \
    }                                                                       \
  } while (false)
