#pragma once

#include <chrono>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// How ranks write to the parts of a symmetric memory that they cannot map: a backend's own way,
// which only its operations look into.
class TORCH_OVERLAP_API RemoteAccess {
 public:
  RemoteAccess() = default;
  virtual ~RemoteAccess() = default;
  RemoteAccess(const RemoteAccess&) = delete;
  RemoteAccess& operator=(const RemoteAccess&) = delete;

  // All operations of all ranks are done: gives back what it holds. Waits at most `limit`.
  virtual void close(std::chrono::milliseconds limit) = 0;
};

}  // namespace torch_overlap
