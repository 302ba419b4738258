#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace torch_overlap {

// While this lives, the thread's ATen calls do plain work on memory: what the caller has switched
// on (autograd, a dispatch mode of Python's) changes an operation no more than on a thread of ours.
struct PlainDispatch {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

}  // namespace torch_overlap
