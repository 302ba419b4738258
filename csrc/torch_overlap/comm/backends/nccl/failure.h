#pragma once

#include <atomic>
#include <exception>
#include <string>

#include "torch_overlap/comm/work.h"

namespace torch_overlap {

// Reason why a communicator can no longer be used. Set at most once, then read by every call and by
// every work that was not done by then. Thread-safe; reading takes no lock.
class Failure {
 public:
  bool is_set() const noexcept { return set_.load(std::memory_order_acquire); }
  // `status` is TIMEDOUT or ERROR. Returns false if a failure was set before; it stays.
  bool set(WorkStatus status, std::exception_ptr error) noexcept;

  void rethrow_if_set() const {
    if (__builtin_expect(is_set(), 0)) std::rethrow_exception(error_);
  }
  // Valid once a failure is set.
  WorkStatus status() const noexcept { return status_; }
  std::exception_ptr error() const noexcept { return error_; }
  std::string message() const;

 private:
  std::atomic<bool> claimed_{false};
  std::atomic<bool> set_{false};
  WorkStatus status_ = WorkStatus::ERROR;
  std::exception_ptr error_;
};

}  // namespace torch_overlap
