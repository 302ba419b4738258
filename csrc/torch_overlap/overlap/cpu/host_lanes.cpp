#include "torch_overlap/overlap/cpu/host_lanes.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <thread>

#include "torch_overlap/base/strings.h"

namespace torch_overlap {
namespace {

std::atomic<uint64_t> interleaving_seed{0};
std::atomic<uint64_t> interleaved_operations{0};

// A mark encodes the lane and the number of items that were enqueued there before.
constexpr int kLaneBits = 8;

}  // namespace

void set_interleaving(uint64_t seed) { interleaving_seed = seed; }

HostLanes::HostLanes(int num_compute_lanes) : Lanes(num_compute_lanes), queues_(count()) {}

void HostLanes::fork(bool single_lane) {
  const uint64_t seed = interleaving_seed;
  shuffles_ = seed != 0;
  single_lane_ = single_lane && !shuffles_;
  if (shuffles_) random_.seed(seed + 0x9E3779B97F4A7C15ULL * ++interleaved_operations);
}

void HostLanes::put(int lane, Item item) {
  Queue& queue = queue_of(lane);
  queue.items.push_back(std::move(item));
  ++queue.put;
}

void HostLanes::run(int lane, std::string_view name, std::function<void()> work) {
  put(lane, {.name = name, .is_ready = {}, .work = std::move(work)});
}

Lanes::Mark HostLanes::mark(int lane) {
  return queue_of(lane).put << kLaneBits | static_cast<Mark>(single_lane_ ? 0 : lane);
}

void HostLanes::after(int lane, Mark mark) {
  const Queue& before = queues_.at(mark & ((1U << kLaneBits) - 1));
  until(lane, [&before, count = mark >> kLaneBits] { return before.done >= count; });
}

void HostLanes::wait(int lane, std::shared_ptr<WorkPtr> work) {
  until(lane, [work] { return !*work || (*work)->is_completed(); });
  run(lane, "wait", [work] {
    if (*work) (*work)->wait();  // throws the error of the work
  });
}

void HostLanes::until(int lane, std::function<bool()> is_ready) {
  put(lane, {.name = {}, .is_ready = std::move(is_ready), .work = {}});
}

bool HostLanes::advance(Queue& queue) {
  if (queue.items.empty()) return false;
  Item& first = queue.items.front();
  if (first.is_ready && !first.is_ready()) return false;
  const Item item = std::move(first);
  queue.items.pop_front();
  if (item.work) {
    at::RecordFunction span(at::RecordScope::USER_SCOPE);
    if (span.isActive()) span.before(concat("torch_overlap::", item.name));
    item.work();
  }
  ++queue.done;
  return true;
}

void HostLanes::run_until(const std::function<bool()>& is_done) {
  // Communication first: what it starts progresses while GEMMs run.
  std::vector<size_t> order(queues_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  try {
    while (!is_done()) {
      if (shuffles_) std::shuffle(order.begin(), order.end(), random_);
      const bool advanced =
          std::any_of(order.begin(), order.end(), [this](size_t i) { return advance(queues_[i]); });
      if (!advanced) std::this_thread::yield();  // lets other ranks run
    }
  } catch (...) {
    cancel();
    throw;
  }
}

void HostLanes::join() {
  run_until([this] {
    return std::all_of(queues_.begin(), queues_.end(),
                       [](const Queue& queue) { return queue.items.empty(); });
  });
}

void HostLanes::join_lane(int lane) {
  run_until([&queue = queue_of(lane), put = queue_of(lane).put] { return queue.done >= put; });
}

void HostLanes::cancel() noexcept {
  for (Queue& queue : queues_) {
    queue.items.clear();
    queue.done = queue.put;
  }
}

}  // namespace torch_overlap
