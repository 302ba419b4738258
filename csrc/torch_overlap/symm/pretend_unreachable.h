#pragma once

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// For tests: while it exists, new channels and windows behave as if ranks could not reach each
// other's memory. Applies to the whole process; must be equal on all ranks.
class TORCH_OVERLAP_API PretendUnreachable {
 public:
  PretendUnreachable();
  ~PretendUnreachable();
  PretendUnreachable(const PretendUnreachable&) = delete;
  PretendUnreachable& operator=(const PretendUnreachable&) = delete;

  static bool is_on();
  // Reason given in errors.
  static constexpr const char* kReason = "ranks pretend that peers' memory is unreachable";
};

}  // namespace torch_overlap
