#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torch_overlap {

// While this object lives, the thread's ATen calls only operate on memory: what the caller has
// enabled (autograd, a Python dispatch mode) does not affect them, as on a thread of this library.
struct BelowDispatchGuard {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace torch_overlap
