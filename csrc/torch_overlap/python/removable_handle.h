#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap::python {

// Removes a hook. Destroying the handle does not remove it.
class RemovableHandle {
 public:
  RemovableHandle(const std::shared_ptr<TorchComm>& comm, std::function<bool(Hooks&)> remove)
      : comm_(comm), remove_(std::move(remove)) {}

  void remove() {
    if (const auto comm = comm_.lock()) remove_(comm->hooks());
  }

 private:
  std::weak_ptr<TorchComm> comm_;
  std::function<bool(Hooks&)> remove_;
};

}  // namespace torch_overlap::python
