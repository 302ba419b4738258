#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/work.h"

namespace torch_overlap {

struct LaneOptions {
  int computes = 1;
  // As CUDA counts them; both 0: products the least urgent, communication the most.
  int compute_priority = 0;
  int comm_priority = 0;
};

// What an operation does at the same time: lanes of work, each in order, that begin where the
// caller is and end before the caller goes on. On CUDA a lane is a stream; on a CPU the work of all
// lanes is queued, and done by the caller's thread in an order that respects what each waits for.
//
//   fork(false);                   the lanes come behind what the caller has issued
//   run(lane, work); ...           after(other, mark(lane)) orders two lanes, settle(lane) a lane
//                                  and what the caller does by itself before the join
//   join();                        the caller comes behind all lanes
//
// Compute lanes are 0 .. computes() - 1, and comm() is one more. Threads: one operation at a time.
class TORCH_OVERLAP_API Lanes {
 public:
  explicit Lanes(int computes) : computes_(computes) {}
  virtual ~Lanes() = default;
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  int computes() const { return computes_; }
  int comm() const { return computes_; }
  int count() const { return computes_ + 1; }

  // The caller's stream comes behind the operation before, if that was on another; and the next
  // operation will come behind what is on it now.
  virtual void enter() {}
  virtual void leave() {}
  // Waits until the device is done with all that came before a leave(), at most so long.
  virtual void drain(std::chrono::milliseconds timeout) noexcept {}
  // `what` lives until the lanes are gone and the device is done with that.
  virtual void keep(const std::vector<std::shared_ptr<void>>& what) {}

  // `as_one`: of work that takes less time than lanes cost. All is one lane then, in the order in
  // which it is put there; not in a graph, where lanes cost nothing.
  virtual void fork(bool as_one) = 0;
  virtual bool are_one() const { return false; }
  // Whether they are branches of a graph that is being captured.
  virtual bool are_captured() const { return false; }
  virtual void join() = 0;
  // Forgets what is queued, after an error; lanes that run come to an end by themselves.
  virtual void cancel() noexcept = 0;

  // What `work` issues on the current stream becomes part of the lane. Called before run() returns
  // (CUDA), or before join() does (CPU). `name` shows in profiles.
  virtual void run(int lane, std::string_view name, std::function<void()> work) = 0;
  // A point of a lane, for after(): all that was put there before.
  using Mark = uint64_t;
  virtual Mark mark(int lane) = 0;
  // What is put on `lane` from now on comes after `mark`, which is of this operation.
  virtual void after(int lane, Mark mark) = 0;
  // What is put on the caller's stream from now on comes after all that was put on `lane`: on a CPU
  // that is done when this returns.
  virtual void settle(int lane) = 0;
  // What is put on `lane` from now on comes after the work, which something put on a lane before
  // has made by the time this comes to it (null: there is none).
  virtual void wait(int lane, std::shared_ptr<WorkPtr> work) = 0;

 private:
  const int computes_;
};

}  // namespace torch_overlap
