#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/export.h"

namespace torch_overlap {

// How ranks that set something up together talk before they can: small messages, slowly. All that
// symmetric memory needs of the world outside; a communicator's store gives one
// (comm/store_bootstrap.h), and so can any framework that has an all-gather.
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
  // Of each call.
  std::chrono::milliseconds timeout() const { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  // Collective: everybody's bytes, by rank. Throws kTimeout when a rank does not come.
  virtual std::vector<std::string> all_gather(const std::string& mine) = 0;
  // Collective: nobody is past it before all have come.
  virtual void barrier() { (void)all_gather({}); }

 private:
  const int rank_;
  const int size_;
  std::chrono::milliseconds timeout_;
};

// What went wrong on this rank, to be told to the others; empty text: nothing.
struct Fault {
  ErrorKind kind = ErrorKind::kRuntime;
  std::string text;

  explicit operator bool() const { return !text.empty(); }
  // For the other ranks, whom what interrupted this one did not.
  ErrorKind told_kind() const {
    return kind == ErrorKind::kInterrupted ? ErrorKind::kRuntime : kind;
  }
  // Of the exception being handled.
  TORCH_OVERLAP_API static Fault current();
};

// all_gather, of a rank that may have a fault, which then is what it throws, whether or not the
// others came to hear of it.
TORCH_OVERLAP_API std::vector<std::string> tell_all(Bootstrap& bootstrap, const std::string& said,
                                                    const Fault& mine);

// Collective: returns if no rank has a fault, else throws on every rank. The rank with the fault
// throws it as it is; the others throw "<op>: rank 2 could not take part: <text>", of the same
// kind.
TORCH_OVERLAP_API void agree(Bootstrap& bootstrap, std::string_view op, const Fault& mine);

// Messages of several fields, each any bytes.
TORCH_OVERLAP_API std::string pack(const std::vector<std::string>& fields);
TORCH_OVERLAP_API std::vector<std::string> unpack(const std::string& message);

}  // namespace torch_overlap
