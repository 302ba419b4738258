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
  int num_compute_lanes = 1;
  // CUDA stream priorities. Both 0: lowest for compute, highest for communication.
  int compute_priority = 0;
  int comm_priority = 0;
};

// Lanes are queues of work that run concurrently in one operation, each in order. They start after
// the work that the caller has issued, and the caller's later work waits for them. On CUDA a lane
// is a stream; lane 0 is the caller's unless priorities are given. On a CPU the work of all lanes
// is queued, and run on the caller's thread in an order that respects the dependencies.
//
//   fork(false);                   orders the lanes after what the caller has issued
//   run(lane, work); ...           after(other, mark(lane)) orders one lane after another;
//                                  join_lane(lane) orders what the caller does itself, before the
//                                  join, after a lane
//   join();                        orders the caller after all lanes
//
// Compute lanes are 0 .. num_compute_lanes() - 1; comm() is one more. Any thread may use them, for
// one operation at a time.
class TORCH_OVERLAP_API Lanes {
 public:
  explicit Lanes(int num_compute_lanes) : num_compute_lanes_(num_compute_lanes) {}
  virtual ~Lanes() = default;
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  int num_compute_lanes() const { return num_compute_lanes_; }
  int comm() const { return num_compute_lanes_; }
  int count() const { return num_compute_lanes_ + 1; }

  // enter() orders the caller's stream after the previous operation, if that was on another stream.
  // leave() makes the next operation wait for what is on the caller's stream now.
  virtual void enter() {}
  virtual void leave() {}
  // Waits until the device has finished all work issued before a leave(), for at most `timeout`.
  virtual void drain(std::chrono::milliseconds timeout) noexcept {}
  // Keeps `what` alive until the lanes are destroyed and the device has finished using it.
  virtual void keep(const std::vector<std::shared_ptr<void>>& what) {}

  // `single_lane` is for work that is shorter than the overhead of lanes: everything then runs on
  // one lane, in the order in which it is enqueued. Ignored in a capture, where lanes cost nothing.
  virtual void fork(bool single_lane) = 0;
  virtual bool is_single_lane() const { return false; }
  // True if the lanes are branches of a graph that is being captured.
  virtual bool is_captured() const { return false; }
  virtual void join() = 0;
  // Drops what is queued, after an error. Work that is already running finishes by itself.
  virtual void cancel() noexcept = 0;

  // Enqueues on the lane what `work` issues on the current stream. `work` is called before run()
  // returns (CUDA), or before join() returns (CPU): what it captures by reference must live, and
  // not change, until then. `name` appears in profiles.
  virtual void run(int lane, std::string_view name, std::function<void()> work) = 0;
  // A point of a lane, for after(): everything that was enqueued there before.
  using Mark = uint64_t;
  virtual Mark mark(int lane) = 0;
  // Orders what is enqueued on `lane` from now on after `mark`, which must be of this operation.
  virtual void after(int lane, Mark mark) = 0;
  // Orders what the caller enqueues on its stream from now on after everything on `lane`. On a CPU
  // that work has finished when this returns.
  virtual void join_lane(int lane) = 0;
  // Orders what is enqueued on `lane` from now on after `*work`, which an earlier item of some lane
  // sets before this one runs (null: nothing to wait for).
  virtual void wait(int lane, std::shared_ptr<WorkPtr> work) = 0;

 private:
  const int num_compute_lanes_;
};

}  // namespace torch_overlap
