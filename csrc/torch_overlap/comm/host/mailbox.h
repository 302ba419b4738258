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

// Where ranks that share memory meet. A half waits here for its other half; whoever posts second
// copies the bytes, so a message costs one copy and no thread.
//
//   rank 0: send(to 1)  ---- waits in slot (0 -> 1) ----.
//   rank 1: recv(from 0) --- finds it there, copies, wakes rank 0
//
// Shared by the ranks; Transfers keep it alive. Threads: any.
class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  explicit Mailbox(int size);
  ~Mailbox();

  std::unique_ptr<Transfer> post(int rank, bool is_send, const Message& message);

  // All transfers of `rank`, now and later, throw `reason`.
  void stop(int rank, const std::string& reason);
  // The transfers of others with `rank`, now and later, throw that it has left and why.
  void leave(int rank, const std::string& reason);
  // What those transfers throw; empty: it has not left.
  std::string why_left(int rank);
  // Sleeps until `until`, or until `rank` is stopped: then throws as its transfers do.
  void sleep(int rank, Deadline until);

 private:
  class Half;
  struct Rank {
    std::string stopped;  // empty: no
    std::string left;
    std::condition_variable changed;
  };

  // Halves between two ranks; `from` is size_ for receives from any rank.
  std::deque<Half*>& slot(int from, int to, Channel channel);
  // The waiting half that `mine` matches, taken out of its slot; null if there is none yet.
  Half* take_match(const Half& mine);
  // Ends all waiting halves for which `dies` is true with `error`. The lock is held.
  template <typename Predicate>
  void end_waiting(const Predicate& dies, const std::exception_ptr& error);

  const int size_;
  std::mutex mutex_;
  std::vector<Rank> ranks_;
  uint64_t posted_ = 0;                   // counts the halves
  std::vector<std::deque<Half*>> slots_;  // waiting halves, in order of posting
};

}  // namespace torch_overlap
