#pragma once

#include <cstdint>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Remembers the process that made it, so that a child of fork(), which has the objects of its
// parent and none of its threads, can be told what it must not use. Asking costs one load.
class TORCH_OVERLAP_API ProcessStamp {
 public:
  ProcessStamp();
  bool is_current() const noexcept;

 private:
  uint64_t forks_;
};

}  // namespace torch_overlap
