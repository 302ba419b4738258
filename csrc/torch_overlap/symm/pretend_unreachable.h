#pragma once

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// For tests: channels and windows that are made while it lives take the way of ranks that cannot
// reach each other's memory. Of the whole process; equal on all ranks.
class TORCH_OVERLAP_API PretendUnreachable {
 public:
  PretendUnreachable();
  ~PretendUnreachable();
  PretendUnreachable(const PretendUnreachable&) = delete;
  PretendUnreachable& operator=(const PretendUnreachable&) = delete;

  static bool is_on();
  // What the pretence is in errors.
  static constexpr const char* kReason = "ranks are told not to use each other's memory";
};

}  // namespace torch_overlap
