#include "torch_overlap/base/boundary.h"

#include <atomic>

namespace torch_overlap {
namespace {

std::atomic<ThrowCounterpart> counterpart{nullptr};

}  // namespace

void set_throw_counterpart(ThrowCounterpart throw_counterpart) { counterpart = throw_counterpart; }

void leave(const Error& caught) {
  if (const ThrowCounterpart throw_counterpart = counterpart) throw_counterpart(caught);
  throw;
}

}  // namespace torch_overlap
