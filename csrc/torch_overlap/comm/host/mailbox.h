#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "torch_overlap/comm/host/transport.h"

namespace torch_overlap {

// Matches the messages of ranks that share memory. The half that is posted first waits here; the
// rank that posts the second one copies the bytes, so a message needs one copy and no thread.
//
//   rank 0: send(to 1)  ---- waits in slot (0 -> 1) ----.
//   rank 1: recv(from 0) --- finds it there, copies, wakes rank 0
//
// Shared by the ranks; Transfers keep it alive. Thread-safe.
class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  explicit Mailbox(int size);
  ~Mailbox();

  std::unique_ptr<Transfer> post(int rank, bool is_send, const Message& message);

  // All current and later transfers of `rank` throw `reason`.
  void stop(int rank, const std::string& reason);
  // All current and later transfers of other ranks with `rank` throw that it has left, and why.
  void leave(int rank, const std::string& reason);
  // Returns the message that those transfers throw; empty if `rank` has not left.
  std::string departure_reason(int rank);
  // Sleeps until `until`. If `rank` is stopped first, throws as its transfers do.
  void sleep(int rank, Deadline until);

 private:
  class PostedTransfer;
  struct Rank {
    std::string stopped;  // reason; empty if not stopped
    std::string left;
    std::condition_variable changed;
  };

  // Waiting halves between two ranks; `from` is size_ for receives from any rank.
  std::deque<PostedTransfer*>& slot(int from, int to, MessageKind kind);
  // Removes the waiting half that matches `mine` from its slot; null if there is none yet.
  PostedTransfer* take_match(const PostedTransfer& mine);
  // Ends with `error` all waiting halves for which `should_end` is true. The lock must be held.
  template <typename Predicate>
  void end_waiting(const Predicate& should_end, const std::exception_ptr& error);

  const int size_;
  std::mutex mutex_;
  std::vector<Rank> ranks_;
  uint64_t posted_ = 0;                             // number of posted halves
  std::vector<std::deque<PostedTransfer*>> slots_;  // waiting halves, in order of posting
};

}  // namespace torch_overlap
