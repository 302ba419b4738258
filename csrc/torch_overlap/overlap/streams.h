#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/work.h"

namespace torch_overlap {

struct StreamOptions {
  int num_compute_streams = 1;
  // CUDA stream priorities. Both 0: lowest for compute, highest for communication.
  int compute_priority = 0;
  int comm_priority = 0;
};

// The streams of an overlapped operation. Work of one stream runs in order; different streams run
// concurrently. They start after the work that the caller has issued, and the caller's later work
// waits for them. On CUDA these are CUDA streams, and stream 0 is the caller's unless priorities
// are given. On a CPU the work is queued, and run on the caller's thread in an order that respects
// the dependencies.
//
//   fork(false);                   orders the streams after what the caller has issued
//   run(stream, work); ...         after(other, mark(stream)) orders one stream after another;
//                                  join_stream(stream) orders what the caller does itself, before
//                                  the join, after a stream
//   join();                        orders the caller after all streams
//
// Compute streams are 0 .. num_compute_streams() - 1; comm() is one more. Any thread may use them,
// for one operation at a time.
class TORCH_OVERLAP_API OverlapStreams {
 public:
  explicit OverlapStreams(int num_compute_streams) : num_compute_streams_(num_compute_streams) {}
  virtual ~OverlapStreams() = default;
  OverlapStreams(const OverlapStreams&) = delete;
  OverlapStreams& operator=(const OverlapStreams&) = delete;

  int num_compute_streams() const { return num_compute_streams_; }
  int comm() const { return num_compute_streams_; }
  int count() const { return num_compute_streams_ + 1; }

  // wait_for_previous() orders the caller's stream after the previous operation, if that was on
  // another stream. record_last() makes the next operation wait for what is on the caller's stream
  // now.
  virtual void wait_for_previous() {}
  virtual void record_last() {}
  // Waits until the device has finished all work issued before a record_last(), for at most
  // `timeout`.
  virtual void drain(std::chrono::milliseconds timeout) noexcept {}
  // Keeps `what` alive until the streams are destroyed and the device has finished using it.
  virtual void keep(const std::vector<std::shared_ptr<void>>& what) {}

  // `single_stream` is for work that is shorter than the overhead of several streams: everything
  // then runs on one, in the order in which it is enqueued. Ignored in a capture, where streams
  // cost nothing.
  virtual void fork(bool single_stream) = 0;
  virtual bool is_single_stream() const { return false; }
  // True if the streams are branches of a graph that is being captured.
  virtual bool is_captured() const { return false; }
  virtual void join() = 0;
  // Drops what is queued, after an error. Work that is already running finishes by itself.
  virtual void cancel() noexcept = 0;

  // Enqueues on the stream what `work` issues on the current stream. `work` is called before run()
  // returns (CUDA), or before join() returns (CPU): what it captures by reference must live, and
  // not change, until then. `name` appears in profiles.
  virtual void run(int stream, std::string_view name, std::function<void()> work) = 0;
  // A point of a stream, for after(): everything that was enqueued there before.
  using Mark = uint64_t;
  virtual Mark mark(int stream) = 0;
  // Orders what is enqueued on `stream` from now on after `mark`, which must be of this operation.
  virtual void after(int stream, Mark mark) = 0;
  // Orders what the caller enqueues on its stream from now on after everything on `stream`. On a
  // CPU that work has finished when this returns.
  virtual void join_stream(int stream) = 0;
  // Orders what is enqueued on `stream` from now on after `*work`, which an earlier item of some
  // stream sets before this one runs (null: nothing to wait for).
  virtual void wait(int stream, std::shared_ptr<WorkPtr> work) = 0;

 private:
  const int num_compute_streams_;
};

}  // namespace torch_overlap
