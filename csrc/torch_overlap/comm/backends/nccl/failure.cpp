#include "torch_overlap/comm/backends/nccl/failure.h"

#include <utility>

namespace torch_overlap {

bool Failure::set(WorkStatus status, std::exception_ptr error) noexcept {
  if (claimed_.exchange(true, std::memory_order_acq_rel)) return false;
  status_ = status;
  error_ = std::move(error);
  set_.store(true, std::memory_order_release);
  return true;
}

std::string Failure::message() const {
  try {
    std::rethrow_exception(error_);
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace torch_overlap
