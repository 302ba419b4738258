#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "torch_overlap/comm/host/transport.h"

namespace torch_overlap {

// Worker threads that each run their tasks one after the other, in the order in which they came: a
// lane. The thread of a lane starts with its first task that cannot run on the caller's.
//
// A lane is named by a key. Keys 0 .. count-1 have a lane each, for good. Any other key gets one
// that is idle, or a new one, when a task comes, and keeps it until that lane is idle: there are as
// many lanes as there are keys with tasks at a time. The thread of such a lane ends some seconds
// after its last task.
//
// Threads: any may call. Tasks must not throw. The destructor lets the threads run what is queued;
// it waits for them for a second and then leaves them to end by themselves, so that it may run on a
// lane, or on a thread that holds what a task waits for (Python's lock).
class TaskLanes {
 public:
  using Task = std::function<void()>;
  using Key = int64_t;
  // A part of an operation, and the lane that it runs on.
  using Part = std::pair<Key, Task>;

  explicit TaskLanes(int count);
  ~TaskLanes();
  TaskLanes(const TaskLanes&) = delete;
  TaskLanes& operator=(const TaskLanes&) = delete;

  // Makes all `lanes` the caller's if they are idle: it may then do their work itself, and must
  // call release(). Else false.
  bool try_acquire(std::span<const Key> lanes);
  void release(std::span<const Key> lanes);
  // Runs the task on a lane of its own, which nothing else is queued on meanwhile.
  void push_alone(Task task);
  // Queues all parts at once, or throws and queues none.
  void push(std::vector<Part> parts);

  // Waits until no lane has anything to do. False if `deadline` came first.
  bool drain(Deadline deadline);
  // Drains, then ends the threads. False if `deadline` came first; the threads then end when their
  // tasks do.
  bool close(Deadline deadline);

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state, int index, bool is_fixed);
  // The lock is held.
  void require_open() const;
  // The lane of `key`; makes one if need be.
  int lane_of(Key key);
  // A lane that belongs to no key, for the caller to use at once.
  int free_lane();
  // Starts the lane's thread; throws if there can be none, and then nothing is queued.
  void start(int index);
  void enqueue(int index, Task task);

  const size_t fixed_;            // lanes that keys 0 .. count-1 have
  std::shared_ptr<State> state_;  // the threads share it
};

}  // namespace torch_overlap
