#include "torch_overlap/symm/cuda/device_wait_monitor.h"

#include <c10/cuda/CUDAGuard.h>

#include <atomic>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/cuda/stream.h"
#include "torch_overlap/symm/cuda/window_kernels.h"
#include "torch_overlap/symm/op_signature.h"

namespace torch_overlap::cuda {
namespace {

// Storage without a monitor. Never freed: CUDA may be shut down, or busy with a capture, when a
// monitor is destroyed.
struct FreeStorage {
  std::mutex mutex;
  std::map<c10::DeviceIndex, std::vector<DeviceWaitMonitor::Storage>> unused;
};

FreeStorage& free_storage() {
  static auto* instance = new FreeStorage;
  return *instance;
}

DeviceWaitMonitor::Storage make_storage() {
  DeviceWaitMonitor::Storage block{};
  void* record = nullptr;
  void* failed = nullptr;
  check(cudaHostAlloc(&record, sizeof(WaitRecord), cudaHostAllocMapped), "cudaHostAlloc");
  if (const cudaError_t status = cudaMalloc(&failed, sizeof(uint32_t)); status != cudaSuccess) {
    (void)cudaFreeHost(record);
    check(status, "cudaMalloc");
  }
  block.record = static_cast<WaitRecord*>(record);
  block.failed = static_cast<uint32_t*>(failed);
  return block;
}

DeviceWaitMonitor::Storage acquire_storage(c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCapture relaxed;
  DeviceWaitMonitor::Storage block{};
  {
    const std::lock_guard lock(free_storage().mutex);
    auto& unused = free_storage().unused[device];
    if (!unused.empty()) {
      block = unused.back();
      unused.pop_back();
    }
  }
  if (block.record == nullptr) block = make_storage();
  *block.record = {};
  // Uses its own stream: the default stream may be captured, or have much work.
  const OwnedStream stream(device, /*high_priority=*/false);
  check(cudaMemsetAsync(block.failed, 0, sizeof(uint32_t), stream.get().stream()),
        "cudaMemsetAsync");
  check(cudaStreamSynchronize(stream.get().stream()), "cudaStreamSynchronize");
  return block;
}

}  // namespace

DeviceWaitMonitor::DeviceWaitMonitor(c10::DeviceIndex device)
    : device_(device), storage_(acquire_storage(device)) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCapture relaxed;
  check(load_window_kernels(), "windows: loading kernels");
}

DeviceWaitMonitor::~DeviceWaitMonitor() {
  try {
    const std::lock_guard lock(free_storage().mutex);
    free_storage().unused[device_].push_back(storage_);
  } catch (const std::bad_alloc&) {  // then it leaks
  }
}

void DeviceWaitMonitor::signal(SymmetricMemory& window, int dst, cudaStream_t stream) const {
  signal(window.signals().to(dst), stream);
}

void DeviceWaitMonitor::signal(uint64_t* count, cudaStream_t stream) const {
  check(launch_signal(
            count, {.failed = storage_.failed, .record = storage_.record, .timeout_ns = 0}, stream),
        "signal");
}

void DeviceWaitMonitor::wait(SymmetricMemory& window, int src, std::chrono::milliseconds timeout,
                             cudaStream_t stream) {
  const WaitParams params{.arrived = window.signals().arrived(src),
                          .consumed = window.signals().consumed(src),
                          .control = control(window.id(), window.name(), timeout),
                          .memory_id = window.id(),
                          .peer = src};
  check(launch_wait(params, stream), "wait_signal");
}

WaitControl DeviceWaitMonitor::control(uint64_t id, const std::string& name,
                                       std::chrono::milliseconds timeout) {
  {
    const std::lock_guard lock(mutex_);
    names_.try_emplace(id, name);
  }
  const auto limit = std::chrono::duration_cast<std::chrono::nanoseconds>(timeout);
  return {.failed = storage_.failed,
          .record = storage_.record,
          .timeout_ns = static_cast<uint64_t>(limit.count())};
}

void DeviceWaitMonitor::stop() noexcept {
  std::atomic_ref(storage_.record->stopped).store(1, std::memory_order_release);
}

std::optional<std::string> DeviceWaitMonitor::expired() const {
  const WaitRecord& record = *storage_.record;
  if (std::atomic_ref(storage_.record->expired).load(std::memory_order_acquire) == 0) {
    return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  const auto found = names_.find(record.memory_id);
  const std::string name = found == names_.end() ? "unknown" : found->second;
  const auto within = concat(" within ", record.timeout_ns / 1'000'000, " ms, got ");
  switch (record.kind) {
    case WaitKind::begin:
      return concat(name, ": expected rank ", record.peer, " to begin operation ", record.expected,
                    within, "operation ", record.seen, "; do all ranks make the same calls?");
    case WaitKind::peer_aborted:
      return concat(name, ": expected all ranks to take part in operation ", record.expected,
                    ", got one that has given up; its own error says why");
    case WaitKind::signature_mismatch:
      return describe_entry_mismatch(name, EntryPayload::of(static_cast<uint32_t>(record.expected)),
                                     "here", EntryPayload::of(static_cast<uint32_t>(record.seen)),
                                     record.peer);
    case WaitKind::chunk:
      return concat(name, ": expected rank ", record.peer, " to do its part of operation ",
                    record.expected, within, "operation ", record.seen,
                    "; do all ranks make the same calls?");
    case WaitKind::step:
      return concat(name, ": expected rank ", record.peer, " to come to step ", record.expected,
                    " of block ", record.block, within, "step ", record.seen,
                    "; do all ranks make the same calls?");
    case WaitKind::concurrent_ops:
      return concat(
          name,
          ": expected one replay at a time of the graphs of a communicator, got two that "
          "ran at once; replay them on one stream or order the streams by events, or "
          "capture with the hint custom_collectives=off and without algorithm=\"low_latency\"");
    case WaitKind::signal:
      break;
  }
  return concat("wait_signal: expected signal ", record.expected, " of rank ", record.peer,
                " in window '", name, "'", within, record.seen, "; look at what rank ", record.peer,
                " does");
}

std::string DeviceWaitMonitor::late() const {
  if (std::atomic_ref(storage_.record->is_late).load(std::memory_order_acquire) == 0) return {};
  const WaitRecord::Late late = storage_.record->late;
  return concat("rank ", late.peer, " is missing: expected step ", late.expected, " of block ",
                late.block, ", got step ", late.seen);
}

}  // namespace torch_overlap::cuda
