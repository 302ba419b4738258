#include "torch_overlap/comm/host/task_queues.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/interrupt.h"
#include "torch_overlap/comm/shutdown.h"

namespace torch_overlap {
namespace {

// Time that the thread of a queue that is not fixed waits for its next task.
constexpr auto kThreadKeepAlive = std::chrono::seconds(5);

}  // namespace

struct TaskQueues::State {
  // Process exit waits for queued and running items.
  struct Item {
    std::unique_ptr<BackgroundTask> until_done;
    Task task;  // last member: its captures are destroyed first
  };
  struct Queue {
    std::deque<Item> tasks;
    bool busy = false;
    std::optional<Key> key;  // the last key assigned to the queue; empty for a fixed queue
    std::condition_variable ready;
    std::thread thread;

    bool idle() const { return !busy && tasks.empty(); }
  };

  std::mutex mutex;
  std::condition_variable idle;  // notified when a queue becomes idle or a thread ends
  std::vector<std::unique_ptr<Queue>> queues;
  bool closed = false;
  int running = 0;  // number of threads

  bool all_idle() const {
    return std::all_of(queues.begin(), queues.end(),
                       [](const auto& queue) { return queue == nullptr || queue->idle(); });
  }

  Queue& queue(int index) {
    auto& slot = queues[index];
    if (slot == nullptr) slot = std::make_unique<Queue>();
    return *slot;
  }
};

TaskQueues::TaskQueues(int count) : fixed_(count), state_(std::make_shared<State>()) {
  state_->queues.resize(count);
}

TaskQueues::~TaskQueues() {
  if (close(HostClock::now() + std::chrono::seconds(1))) return;
  std::lock_guard lock(state_->mutex);
  for (auto& queue : state_->queues) {
    if (queue != nullptr && queue->thread.joinable()) queue->thread.detach();
  }
}

bool TaskQueues::try_acquire(std::span<const Key> queues) {
  std::lock_guard lock(state_->mutex);
  size_t taken = 0;
  for (; taken < queues.size(); ++taken) {
    State::Queue& queue = state_->queue(queue_of(queues[taken]));
    if (!queue.idle()) break;
    queue.busy = true;
  }
  if (taken == queues.size()) return true;
  while (taken > 0) state_->queue(queue_of(queues[--taken])).busy = false;
  return false;
}

void TaskQueues::release(std::span<const Key> queues) {
  std::lock_guard lock(state_->mutex);
  for (const Key key : queues) {
    State::Queue& queue = state_->queue(queue_of(key));
    queue.busy = false;
    queue.ready.notify_one();  // a task may have been queued meanwhile
  }
  state_->idle.notify_all();
}

void TaskQueues::push(std::vector<Part> parts) {
  std::lock_guard lock(state_->mutex);
  // Starts every thread before a task is queued, so that all parts are queued or none. A queue that
  // is to get a part below is marked busy, so that it is not idle for the next part.
  std::vector<int> queues;
  std::vector<int> claimed;
  const auto unclaim = [&] {
    for (const int index : claimed) state_->queue(index).busy = false;
  };
  try {
    for (const auto& part : parts) {
      const int index = queue_of(part.first);
      queues.push_back(index);
      start(index);
      if (!state_->queue(index).idle()) continue;
      state_->queue(index).busy = true;
      claimed.push_back(index);
    }
  } catch (...) {
    unclaim();
    throw;
  }
  unclaim();
  for (size_t i = 0; i < parts.size(); ++i) enqueue(queues[i], std::move(parts[i].second));
}

int TaskQueues::queue_of(Key key) {
  if (key < static_cast<Key>(fixed_)) return static_cast<int>(key);
  const auto& queues = state_->queues;
  for (size_t index = fixed_; index < queues.size(); ++index) {
    if (queues[index]->key == key && !queues[index]->idle()) return static_cast<int>(index);
  }
  const int index = idle_queue();
  queues[index]->key = key;
  return index;
}

int TaskQueues::idle_queue() {
  auto& queues = state_->queues;
  size_t index = fixed_;
  while (index < queues.size() && !queues[index]->idle()) ++index;
  if (index == queues.size()) queues.push_back(std::make_unique<State::Queue>());
  queues[index]->key.reset();
  return static_cast<int>(index);
}

void TaskQueues::push_alone(Task task) {
  std::lock_guard lock(state_->mutex);
  require_open();  // first: close() reads the queues
  const int index = idle_queue();
  start(index);
  enqueue(index, std::move(task));
}

void TaskQueues::require_open() const {
  TORCH_OVERLAP_CHECK(!state_->closed, kState,
                      "expected a communicator that takes operations, got one that was closed");
}

void TaskQueues::start(int index) {
  require_open();
  State::Queue& queue = state_->queue(index);
  if (queue.thread.joinable()) return;
  queue.thread = std::thread([state = state_, index, is_fixed = index < static_cast<int>(fixed_)] {
    work(state, index, is_fixed);
  });
  ++state_->running;
}

void TaskQueues::enqueue(int index, Task task) {
  State::Queue& queue = state_->queue(index);
  queue.tasks.push_back({std::make_unique<BackgroundTask>(), std::move(task)});
  queue.ready.notify_one();
}

void TaskQueues::work(const std::shared_ptr<State>& state, int index, bool is_fixed) {
  std::unique_lock lock(state->mutex);
  State::Queue& queue = *state->queues[index];
  while (true) {
    const auto has_work = [&] { return !queue.busy && (!queue.tasks.empty() || state->closed); };
    if (!is_fixed && !queue.ready.wait_for(lock, kThreadKeepAlive, has_work)) {
      if (queue.busy) continue;  // a caller acquired the queue
      queue.thread.detach();     // the next task starts another thread
      break;
    }
    queue.ready.wait(lock, has_work);
    if (queue.tasks.empty()) break;
    std::optional<State::Item> item(std::move(queue.tasks.front()));
    queue.tasks.pop_front();
    queue.busy = true;
    lock.unlock();
    item->task();
    item.reset();  // without the lock
    lock.lock();
    queue.busy = false;
    if (queue.tasks.empty()) state->idle.notify_all();
  }
  --state->running;
  state->idle.notify_all();
}

bool TaskQueues::drain(Deadline deadline) {
  std::unique_lock lock(state_->mutex);
  return wait_interruptibly(state_->idle, lock, deadline, [this] { return state_->all_idle(); });
}

bool TaskQueues::close(Deadline deadline) {
  std::unique_lock lock(state_->mutex);
  state_->closed = true;
  for (auto& queue : state_->queues) {
    if (queue != nullptr) queue->ready.notify_one();
  }
  const auto self = std::this_thread::get_id();
  for (auto& queue : state_->queues) {
    if (queue != nullptr && queue->thread.get_id() == self) return false;
  }
  const auto ended = [this] { return state_->running == 0 && state_->all_idle(); };
  if (!state_->idle.wait_until(lock, deadline, ended)) return false;
  std::vector<std::thread> threads;  // moved out: other threads may still read the queues
  for (auto& queue : state_->queues) {
    if (queue != nullptr && queue->thread.joinable()) threads.push_back(std::move(queue->thread));
  }
  lock.unlock();
  for (auto& thread : threads) thread.join();
  return true;
}

}  // namespace torch_overlap
