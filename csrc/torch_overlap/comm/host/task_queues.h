#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "torch_overlap/comm/host/transport.h"

namespace torch_overlap {

// Queues of tasks, each with a worker thread. A queue runs its tasks one at a time in the order in
// which they were queued. Its thread starts with the first task that cannot run on the caller's
// thread.
//
// A key identifies a queue. Each of the keys 0 .. count-1 has a fixed queue. Any other key is
// assigned an idle queue, or a new one, when it gets a task, and keeps it until the queue is idle.
// The number of these queues is the number of such keys that have tasks at the same time. Their
// threads end some seconds after the last task.
//
// Thread-safe. Tasks must not throw. The destructor lets the threads run the queued tasks. It waits
// for the threads for one second, then detaches them, so it may run on a queue's thread, or on a
// thread that holds a resource that a task waits for (the GIL).
class TaskQueues {
 public:
  using Task = std::function<void()>;
  using Key = int64_t;
  // The key of a queue, and the part of an operation that runs on it.
  using Part = std::pair<Key, Task>;

  explicit TaskQueues(int count);
  ~TaskQueues();
  TaskQueues(const TaskQueues&) = delete;
  TaskQueues& operator=(const TaskQueues&) = delete;

  // Acquires all `queues` and returns true if they are idle: the caller may then run their work
  // itself, and must call release(). Otherwise acquires none and returns false.
  bool try_acquire(std::span<const Key> queues);
  void release(std::span<const Key> queues);
  // Runs the task on a queue on which nothing else is queued meanwhile.
  void push_alone(Task task);
  // Queues all parts at once, or throws and queues none.
  void push(std::vector<Part> parts);

  // Waits until all queues are idle. Returns false if `deadline` passed first.
  bool drain(Deadline deadline);
  // Refuses new tasks, waits until all queues are idle, then ends the threads. Returns false if
  // `deadline` passed first, or at once on a queue's thread; the threads then end with their tasks.
  bool close(Deadline deadline);

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state, int index, bool is_fixed);
  // The lock must be held.
  void require_open() const;
  // Returns the queue of `key`; assigns one if it has none.
  int queue_of(Key key);
  // Returns an idle queue without a key, for immediate use.
  int idle_queue();
  // Starts the queue's thread. If none can be created it throws, and nothing is queued.
  void start(int index);
  void enqueue(int index, Task task);

  const size_t fixed_;            // number of queues of keys 0 .. count-1
  std::shared_ptr<State> state_;  // shared with the threads
};

}  // namespace torch_overlap
