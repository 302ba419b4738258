#pragma once

#include <chrono>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// A backend's method of writing to the parts of a symmetric memory that cannot be mapped. Only the
// operations of that backend look into it.
class TORCH_OVERLAP_API RemoteAccess {
 public:
  RemoteAccess() = default;
  virtual ~RemoteAccess() = default;
  RemoteAccess(const RemoteAccess&) = delete;
  RemoteAccess& operator=(const RemoteAccess&) = delete;

  // Releases its resources after all operations of all ranks have completed. Waits at most `limit`.
  virtual void close(std::chrono::milliseconds limit) = 0;
};

}  // namespace torch_overlap
