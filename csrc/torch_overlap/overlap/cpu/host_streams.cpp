#include "torch_overlap/overlap/cpu/host_streams.h"

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

// A mark encodes the stream and the number of items that were enqueued there before.
constexpr int kStreamBits = 8;

}  // namespace

void set_interleaving(uint64_t seed) { interleaving_seed = seed; }

HostStreams::HostStreams(int num_compute_streams)
    : OverlapStreams(num_compute_streams), queues_(count()) {}

void HostStreams::fork(bool single_stream) {
  const uint64_t seed = interleaving_seed;
  shuffles_ = seed != 0;
  single_stream_ = single_stream && !shuffles_;
  if (shuffles_) random_.seed(seed + 0x9E3779B97F4A7C15ULL * ++interleaved_operations);
}

void HostStreams::enqueue(int stream, Item item) {
  Queue& queue = queue_of(stream);
  queue.items.push_back(std::move(item));
  ++queue.enqueued;
}

void HostStreams::run(int stream, std::string_view name, std::function<void()> work) {
  enqueue(stream, {.name = name, .is_ready = {}, .work = std::move(work)});
}

OverlapStreams::Mark HostStreams::mark(int stream) {
  return queue_of(stream).enqueued << kStreamBits | static_cast<Mark>(single_stream_ ? 0 : stream);
}

void HostStreams::after(int stream, Mark mark) {
  const Queue& before = queues_.at(mark & ((1U << kStreamBits) - 1));
  until(stream, [&before, count = mark >> kStreamBits] { return before.done >= count; });
}

void HostStreams::wait(int stream, std::shared_ptr<WorkPtr> work) {
  until(stream, [work] { return !*work || (*work)->is_completed(); });
  run(stream, "wait", [work] {
    if (*work) (*work)->wait();  // throws the error of the work
  });
}

void HostStreams::until(int stream, std::function<bool()> is_ready) {
  enqueue(stream, {.name = {}, .is_ready = std::move(is_ready), .work = {}});
}

bool HostStreams::advance(Queue& queue) {
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

void HostStreams::run_until(const std::function<bool()>& is_done) {
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

void HostStreams::join() {
  run_until([this] {
    return std::all_of(queues_.begin(), queues_.end(),
                       [](const Queue& queue) { return queue.items.empty(); });
  });
}

void HostStreams::join_stream(int stream) {
  run_until([&queue = queue_of(stream), count = queue_of(stream).enqueued] {
    return queue.done >= count;
  });
}

void HostStreams::cancel() noexcept {
  for (Queue& queue : queues_) {
    queue.items.clear();
    queue.done = queue.enqueued;
  }
}

}  // namespace torch_overlap
