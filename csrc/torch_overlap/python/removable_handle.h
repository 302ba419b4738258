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
      : remove_([comm = std::weak_ptr<TorchComm>(comm), remove = std::move(remove)] {
          if (const auto alive = comm.lock()) remove(alive->hooks());
        }) {}
  // For hooks of several communicators.
  explicit RemovableHandle(std::function<void()> remove) : remove_(std::move(remove)) {}

  void remove() { remove_(); }

 private:
  std::function<void()> remove_;
};

}  // namespace torch_overlap::python
