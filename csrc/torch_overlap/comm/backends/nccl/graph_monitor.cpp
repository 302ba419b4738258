#include "torch_overlap/comm/backends/nccl/graph_monitor.h"

#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <atomic>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/backends/nccl/counter_kernel.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap {
namespace {

constexpr size_t kCountersPerBlock = 512;
constexpr size_t kBlockBytes = kCountersPerBlock * 2 * sizeof(uint32_t);

uint32_t read(uint32_t* shown) { return std::atomic_ref(*shown).load(std::memory_order_acquire); }

}  // namespace

ReplayCounterPool::~ReplayCounterPool() {
  const c10::cuda::CUDAGuard guard(device_);
  for (size_t i = 0; i < blocks_.size(); i += 2) {
    (void)cudaFree(blocks_[i]);
    (void)cudaFreeHost(blocks_[i + 1]);
  }
}

void ReplayCounterPool::grow() {
  const c10::cuda::CUDAGuard guard(device_);
  const cuda::RelaxedCapture relaxed;
  void* counters = nullptr;
  void* shown = nullptr;
  cuda::check(cudaMalloc(&counters, kBlockBytes), "cudaMalloc");
  cudaError_t status = cudaHostAlloc(&shown, kBlockBytes, cudaHostAllocMapped);
  if (status == cudaSuccess) {
    std::fill_n(static_cast<char*>(shown), kBlockBytes, 0);
    // Uses a stream of its own: the default stream may be captured or busy.
    const cuda::OwnedStream stream(device_, /*high_priority=*/false);
    status = cudaMemcpyAsync(counters, shown, kBlockBytes, cudaMemcpyHostToDevice,
                             stream.get().stream());
    if (status == cudaSuccess) status = cudaStreamSynchronize(stream.get().stream());
  }
  if (status != cudaSuccess) {
    (void)cudaFree(counters);
    if (shown != nullptr) (void)cudaFreeHost(shown);
    cuda::check(status, "graph timeouts: memory for counters");
  }
  auto* const on_device = static_cast<uint32_t*>(counters);
  auto* const on_host = static_cast<uint32_t*>(shown);
  blocks_.push_back(on_device);
  blocks_.push_back(on_host);
  for (size_t i = 0; i < 2 * kCountersPerBlock; i += 2) {
    free_.push_back({on_device + i, on_device + i + 1, on_host + i, on_host + i + 1});
  }
}

ReplayCounterPool::ReplayCounters ReplayCounterPool::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) grow();
  const ReplayCounters mark = free_.back();
  free_.pop_back();
  return mark;
}

void ReplayCounterPool::give(const ReplayCounters& mark) {
  if (read(mark.started) != read(mark.ended)) return;  // not reused
  std::lock_guard lock(mutex_);
  free_.push_back(mark);
}

GraphMonitor::~GraphMonitor() {
  for (const Entry& entry : entries_) pool_->give(entry.mark);
}

void GraphMonitor::watch_begin(const Call& call, cudaStream_t side) {
  const ReplayCounterPool::ReplayCounters mark = pool_->take();
  const uint32_t before = read(mark.started);
  entries_.push_back({mark, call.describe(), clamp_timeout(call.timeout), before, before});
  cuda::check(increment_counter(mark.started_counter, mark.started, side),
              "graph timeouts: begin mark");
}

void GraphMonitor::watch_end(cudaStream_t side) {
  const ReplayCounterPool::ReplayCounters& mark = entries_.back().mark;
  cuda::check(increment_counter(mark.ended_counter, mark.ended, side), "graph timeouts: end mark");
}

// The counters are not reused: a kernel that increments them may be in the graph.
void GraphMonitor::drop_last() { entries_.pop_back(); }

std::optional<std::string> GraphMonitor::check(Clock::time_point now) {
  for (Entry& entry : entries_) {
    const uint32_t ended = read(entry.mark.ended);  // first: it never overtakes `started`
    const uint32_t started = read(entry.mark.started);
    if (started == ended) continue;
    if (entry.running != started) {
      entry.running = started;
      entry.since = now;
      continue;
    }
    if (now - entry.since < entry.timeout) continue;
    const std::chrono::duration<double> late = now - entry.since;
    return concat(entry.what, ", operation ", &entry - entries_.data() + 1, " of ", entries_.size(),
                  " in graph ", graph_, " of the communicator, replay ",
                  started - entry.started_before, ": expected it to end within ",
                  entry.timeout.count(), " ms of its start, got none after ", late.count(),
                  " s; a peer did not replay, or not the same graph: look at the other ranks");
  }
  return std::nullopt;
}

}  // namespace torch_overlap
