#include "torch_overlap/comm/host/lanes.h"

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

// Time that the thread of a lane that is not fixed waits for its next task.
constexpr auto kLaneKeepAlive = std::chrono::seconds(5);

}  // namespace

struct TaskLanes::State {
  // Process exit waits for queued and running items.
  struct Item {
    std::unique_ptr<BackgroundTask> until_done;
    Task task;  // last member: its captures are destroyed first
  };
  struct Lane {
    std::deque<Item> queue;
    bool busy = false;
    std::optional<Key> key;  // the last key assigned to the lane; empty for a fixed lane
    std::condition_variable ready;
    std::thread thread;

    bool idle() const { return !busy && queue.empty(); }
  };

  std::mutex mutex;
  std::condition_variable idle;  // notified when a lane becomes idle or a thread ends
  std::vector<std::unique_ptr<Lane>> lanes;
  bool closed = false;
  int running = 0;  // number of threads

  bool all_idle() const {
    return std::all_of(lanes.begin(), lanes.end(),
                       [](const auto& lane) { return lane == nullptr || lane->idle(); });
  }

  Lane& lane(int index) {
    auto& slot = lanes[index];
    if (slot == nullptr) slot = std::make_unique<Lane>();
    return *slot;
  }
};

TaskLanes::TaskLanes(int count) : fixed_(count), state_(std::make_shared<State>()) {
  state_->lanes.resize(count);
}

TaskLanes::~TaskLanes() {
  if (close(HostClock::now() + std::chrono::seconds(1))) return;
  std::lock_guard lock(state_->mutex);
  for (auto& lane : state_->lanes) {
    if (lane != nullptr && lane->thread.joinable()) lane->thread.detach();
  }
}

bool TaskLanes::try_acquire(std::span<const Key> lanes) {
  std::lock_guard lock(state_->mutex);
  size_t taken = 0;
  for (; taken < lanes.size(); ++taken) {
    State::Lane& lane = state_->lane(lane_of(lanes[taken]));
    if (!lane.idle()) break;
    lane.busy = true;
  }
  if (taken == lanes.size()) return true;
  while (taken > 0) state_->lane(lane_of(lanes[--taken])).busy = false;
  return false;
}

void TaskLanes::release(std::span<const Key> lanes) {
  std::lock_guard lock(state_->mutex);
  for (const Key key : lanes) {
    State::Lane& lane = state_->lane(lane_of(key));
    lane.busy = false;
    lane.ready.notify_one();  // a task may have been queued meanwhile
  }
  state_->idle.notify_all();
}

void TaskLanes::push(std::vector<Part> parts) {
  std::lock_guard lock(state_->mutex);
  // Starts every thread before a task is queued, so that all parts are queued or none. A lane that
  // is to get a part below is marked busy, so that it is not idle for the next part.
  std::vector<int> lanes;
  std::vector<int> claimed;
  const auto unclaim = [&] {
    for (const int index : claimed) state_->lane(index).busy = false;
  };
  try {
    for (const auto& part : parts) {
      const int index = lane_of(part.first);
      lanes.push_back(index);
      start(index);
      if (!state_->lane(index).idle()) continue;
      state_->lane(index).busy = true;
      claimed.push_back(index);
    }
  } catch (...) {
    unclaim();
    throw;
  }
  unclaim();
  for (size_t i = 0; i < parts.size(); ++i) enqueue(lanes[i], std::move(parts[i].second));
}

int TaskLanes::lane_of(Key key) {
  if (key < static_cast<Key>(fixed_)) return static_cast<int>(key);
  const auto& lanes = state_->lanes;
  for (size_t index = fixed_; index < lanes.size(); ++index) {
    if (lanes[index]->key == key && !lanes[index]->idle()) return static_cast<int>(index);
  }
  const int index = free_lane();
  lanes[index]->key = key;
  return index;
}

int TaskLanes::free_lane() {
  auto& lanes = state_->lanes;
  size_t index = fixed_;
  while (index < lanes.size() && !lanes[index]->idle()) ++index;
  if (index == lanes.size()) lanes.push_back(std::make_unique<State::Lane>());
  lanes[index]->key.reset();
  return static_cast<int>(index);
}

void TaskLanes::push_alone(Task task) {
  std::lock_guard lock(state_->mutex);
  require_open();  // first: close() reads the lanes
  const int index = free_lane();
  start(index);
  enqueue(index, std::move(task));
}

void TaskLanes::require_open() const {
  TORCH_OVERLAP_CHECK(!state_->closed, kState,
                      "expected a communicator that takes operations, got one that was closed");
}

void TaskLanes::start(int index) {
  require_open();
  State::Lane& lane = state_->lane(index);
  if (lane.thread.joinable()) return;
  lane.thread = std::thread([state = state_, index, is_fixed = index < static_cast<int>(fixed_)] {
    work(state, index, is_fixed);
  });
  ++state_->running;
}

void TaskLanes::enqueue(int index, Task task) {
  State::Lane& lane = state_->lane(index);
  lane.queue.push_back({std::make_unique<BackgroundTask>(), std::move(task)});
  lane.ready.notify_one();
}

void TaskLanes::work(const std::shared_ptr<State>& state, int index, bool is_fixed) {
  std::unique_lock lock(state->mutex);
  State::Lane& lane = *state->lanes[index];
  while (true) {
    const auto has_work = [&] { return !lane.busy && (!lane.queue.empty() || state->closed); };
    if (!is_fixed && !lane.ready.wait_for(lock, kLaneKeepAlive, has_work)) {
      if (lane.busy) continue;  // a caller acquired the lane
      lane.thread.detach();     // the next task starts another thread
      break;
    }
    lane.ready.wait(lock, has_work);
    if (lane.queue.empty()) break;
    std::optional<State::Item> item(std::move(lane.queue.front()));
    lane.queue.pop_front();
    lane.busy = true;
    lock.unlock();
    item->task();
    item.reset();  // without the lock
    lock.lock();
    lane.busy = false;
    if (lane.queue.empty()) state->idle.notify_all();
  }
  --state->running;
  state->idle.notify_all();
}

bool TaskLanes::drain(Deadline deadline) {
  std::unique_lock lock(state_->mutex);
  return wait_interruptibly(state_->idle, lock, deadline, [this] { return state_->all_idle(); });
}

bool TaskLanes::close(Deadline deadline) {
  std::unique_lock lock(state_->mutex);
  state_->closed = true;
  for (auto& lane : state_->lanes) {
    if (lane != nullptr) lane->ready.notify_one();
  }
  const auto self = std::this_thread::get_id();
  for (auto& lane : state_->lanes) {
    if (lane != nullptr && lane->thread.get_id() == self) return false;
  }
  const auto ended = [this] { return state_->running == 0 && state_->all_idle(); };
  if (!state_->idle.wait_until(lock, deadline, ended)) return false;
  std::vector<std::thread> threads;  // moved out: other threads may still read the lanes
  for (auto& lane : state_->lanes) {
    if (lane != nullptr && lane->thread.joinable()) threads.push_back(std::move(lane->thread));
  }
  lock.unlock();
  for (auto& thread : threads) thread.join();
  return true;
}

}  // namespace torch_overlap
