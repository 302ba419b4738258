#pragma once

#include <chrono>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Slow exchange of small messages between ranks that set something up together. Symmetric memory
// needs nothing else from outside. A communicator's store implements it (comm/store_bootstrap.h),
// and any framework with an all-gather can.
//
// Threads: one at a time. All ranks make the same calls in the same order.
class TORCH_OVERLAP_API Bootstrap {
 public:
  Bootstrap(int rank, int size, std::chrono::milliseconds timeout)
      : rank_(rank), size_(size), timeout_(timeout) {}
  virtual ~Bootstrap() = default;
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // Timeout of each call.
  std::chrono::milliseconds timeout() const { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  // Collective: returns the bytes of every rank, by rank. Throws kTimeout if a rank does not take
  // part.
  virtual std::vector<std::string> all_gather(const std::string& mine) = 0;
  // Collective: returns after all ranks have called it.
  virtual void barrier() { (void)all_gather({}); }

 private:
  const int rank_;
  const int size_;
  std::chrono::milliseconds timeout_;
};

// A failure of this rank that the other ranks must know; empty text: none.
struct Fault {
  ErrorKind kind = ErrorKind::kRuntime;
  std::string text;

  explicit operator bool() const { return !text.empty(); }
  // Returns the kind for the other ranks, which were not interrupted themselves.
  ErrorKind kind_for_peers() const {
    return kind == ErrorKind::kInterrupted ? ErrorKind::kRuntime : kind;
  }
  // Returns the fault of the exception being handled, or of `error`.
  TORCH_OVERLAP_API static Fault current();
  TORCH_OVERLAP_API static Fault of(const std::exception_ptr& error);
};

// all_gather for a rank that may have a fault. A fault of this rank is thrown, whether or not the
// other ranks have received it.
TORCH_OVERLAP_API std::vector<std::string> all_gather_or_throw(Bootstrap& bootstrap,
                                                               const std::string& payload,
                                                               const Fault& mine);

// Collective: returns if no rank has a fault, else throws on every rank. The rank with the fault
// throws it unchanged; the others throw "<op>: rank 2 could not take part: <text>", of the same
// kind.
TORCH_OVERLAP_API void throw_if_any_failed(Bootstrap& bootstrap, std::string_view op,
                                           const Fault& mine);

// Messages of several fields, each of arbitrary bytes.
TORCH_OVERLAP_API std::string pack(const std::vector<std::string>& fields);
TORCH_OVERLAP_API std::vector<std::string> unpack(const std::string& message);

}  // namespace torch_overlap
