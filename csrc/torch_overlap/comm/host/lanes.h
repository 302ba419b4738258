#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "torch_overlap/comm/host/transport.h"

namespace torch_overlap {

// Worker threads, one per lane. A lane runs its tasks one at a time in the order in which they were
// queued. Its thread starts with the first task that cannot run on the caller's thread.
//
// A key identifies a lane. Each of the keys 0 .. count-1 has a fixed lane. Any other key is
// assigned an idle lane, or a new one, when it gets a task, and keeps it until the lane is idle.
// The number of these lanes is the number of such keys that have tasks at the same time. Their
// threads end some seconds after the last task.
//
// Thread-safe. Tasks must not throw. The destructor lets the threads run the queued tasks. It waits
// for the threads for one second, then detaches them, so it may run on a lane's thread, or on a
// thread that holds a resource that a task waits for (the GIL).
class TaskLanes {
 public:
  using Task = std::function<void()>;
  using Key = int64_t;
  // The key of a lane, and the part of an operation that runs on it.
  using Part = std::pair<Key, Task>;

  explicit TaskLanes(int count);
  ~TaskLanes();
  TaskLanes(const TaskLanes&) = delete;
  TaskLanes& operator=(const TaskLanes&) = delete;

  // Acquires all `lanes` and returns true if they are idle: the caller may then run their work
  // itself, and must call release(). Otherwise acquires none and returns false.
  bool try_acquire(std::span<const Key> lanes);
  void release(std::span<const Key> lanes);
  // Runs the task on a lane on which nothing else is queued meanwhile.
  void push_alone(Task task);
  // Queues all parts at once, or throws and queues none.
  void push(std::vector<Part> parts);

  // Waits until all lanes are idle. Returns false if `deadline` passed first.
  bool drain(Deadline deadline);
  // Refuses new tasks, waits until all lanes are idle, then ends the threads. Returns false if
  // `deadline` passed first, or at once on a lane's thread; the threads then end with their tasks.
  bool close(Deadline deadline);

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state, int index, bool is_fixed);
  // The lock must be held.
  void require_open() const;
  // Returns the lane of `key`; assigns one if it has none.
  int lane_of(Key key);
  // Returns an idle lane without a key, for immediate use.
  int free_lane();
  // Starts the lane's thread. If none can be created it throws, and nothing is queued.
  void start(int index);
  void enqueue(int index, Task task);

  const size_t fixed_;            // number of lanes of keys 0 .. count-1
  std::shared_ptr<State> state_;  // shared with the threads
};

}  // namespace torch_overlap
