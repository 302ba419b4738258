#include "torch_overlap/comm/backends/nccl/graph_monitor.h"

#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <atomic>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/backends/nccl/mark_kernel.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap {
namespace {

constexpr size_t kMarksInBlock = 512;
constexpr size_t kBlockBytes = kMarksInBlock * 2 * sizeof(uint32_t);

uint32_t read(uint32_t* shown) { return std::atomic_ref(*shown).load(std::memory_order_acquire); }

}  // namespace

MarkPool::~MarkPool() {
  const c10::cuda::CUDAGuard guard(device_);
  for (size_t i = 0; i < blocks_.size(); i += 2) {
    (void)cudaFree(blocks_[i]);
    (void)cudaFreeHost(blocks_[i + 1]);
  }
}

void MarkPool::grow() {
  const c10::cuda::CUDAGuard guard(device_);
  const cuda::RelaxedCapture relaxed;
  void* counters = nullptr;
  void* shown = nullptr;
  cuda::check(cudaMalloc(&counters, kBlockBytes), "cudaMalloc");
  cudaError_t status = cudaHostAlloc(&shown, kBlockBytes, cudaHostAllocMapped);
  if (status == cudaSuccess) {
    std::fill_n(static_cast<char*>(shown), kBlockBytes, 0);
    // On a stream of its own: the default one may be captured, or have much to do.
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
  for (size_t i = 0; i < 2 * kMarksInBlock; i += 2) {
    free_.push_back({on_device + i, on_device + i + 1, on_host + i, on_host + i + 1});
  }
}

MarkPool::Mark MarkPool::take() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) grow();
  const Mark mark = free_.back();
  free_.pop_back();
  return mark;
}

void MarkPool::give(const Mark& mark) {
  if (read(mark.begun) != read(mark.ended)) return;  // not used again
  std::lock_guard lock(mutex_);
  free_.push_back(mark);
}

GraphMonitor::~GraphMonitor() {
  for (const Entry& entry : entries_) pool_->give(entry.mark);
}

void GraphMonitor::watch_begin(const Call& call, cudaStream_t side) {
  const MarkPool::Mark mark = pool_->take();
  const uint32_t before = read(mark.begun);
  entries_.push_back({mark, call.describe(), bounded_timeout(call.timeout), before, before});
  cuda::check(bump(mark.begun_counter, mark.begun, side), "graph timeouts: begin mark");
}

void GraphMonitor::watch_end(cudaStream_t side) {
  const MarkPool::Mark& mark = entries_.back().mark;
  cuda::check(bump(mark.ended_counter, mark.ended, side), "graph timeouts: end mark");
}

// The mark is not used again: a kernel that counts on it may be in the graph.
void GraphMonitor::forget_last() { entries_.pop_back(); }

std::optional<std::string> GraphMonitor::check(Clock::time_point now) {
  for (Entry& entry : entries_) {
    const uint32_t ended = read(entry.mark.ended);  // first: it never overtakes `begun`
    const uint32_t begun = read(entry.mark.begun);
    if (begun == ended) continue;
    if (entry.running != begun) {
      entry.running = begun;
      entry.since = now;
      continue;
    }
    if (now - entry.since < entry.timeout) continue;
    const std::chrono::duration<double> late = now - entry.since;
    return concat(entry.what, ", operation ", &entry - entries_.data() + 1, " of ", entries_.size(),
                  " in graph ", graph_, " of the communicator, replay ", begun - entry.begun_before,
                  ": expected it to end within ", entry.timeout.count(),
                  " ms of its start, got none after ", late.count(),
                  " s; a peer did not replay, or not the same graph: look at the other ranks");
  }
  return std::nullopt;
}

}  // namespace torch_overlap
