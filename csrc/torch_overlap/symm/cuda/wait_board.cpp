#include "torch_overlap/symm/cuda/wait_board.h"

#include <c10/cuda/CUDAGuard.h>

#include <atomic>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/cuda/stream.h"
#include "torch_overlap/symm/begin.h"
#include "torch_overlap/symm/cuda/window_kernels.h"

namespace torch_overlap::cuda {
namespace {

// Blocks without a board. Never freed: CUDA may be gone, or busy with a capture, when a board ends.
struct Blocks {
  std::mutex mutex;
  std::map<c10::DeviceIndex, std::vector<WaitBoard::Block>> unused;
};

Blocks& blocks() {
  static auto* instance = new Blocks;
  return *instance;
}

WaitBoard::Block make_block() {
  WaitBoard::Block block{};
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

WaitBoard::Block take_block(c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCapture relaxed;
  WaitBoard::Block block{};
  {
    const std::lock_guard lock(blocks().mutex);
    auto& unused = blocks().unused[device];
    if (!unused.empty()) {
      block = unused.back();
      unused.pop_back();
    }
  }
  if (block.record == nullptr) block = make_block();
  *block.record = {};
  // On a stream of its own: the default one may be captured, or have much to do.
  const OwnedStream stream(device, /*high_priority=*/false);
  check(cudaMemsetAsync(block.failed, 0, sizeof(uint32_t), stream.get().stream()),
        "cudaMemsetAsync");
  check(cudaStreamSynchronize(stream.get().stream()), "cudaStreamSynchronize");
  return block;
}

}  // namespace

WaitBoard::WaitBoard(c10::DeviceIndex device) : device_(device), block_(take_block(device)) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCapture relaxed;
  check(load_window_kernels(), "windows: loading kernels");
}

WaitBoard::~WaitBoard() {
  try {
    const std::lock_guard lock(blocks().mutex);
    blocks().unused[device_].push_back(block_);
  } catch (const std::bad_alloc&) {  // then it is lost
  }
}

void WaitBoard::signal(SymmetricMemory& window, int dst, cudaStream_t stream) const {
  signal(window.signals().to(dst), stream);
}

void WaitBoard::signal(uint64_t* count, cudaStream_t stream) const {
  check(launch_signal(count, {.failed = block_.failed, .record = block_.record, .timeout_ns = 0},
                      stream),
        "signal");
}

void WaitBoard::wait(SymmetricMemory& window, int src, std::chrono::milliseconds timeout,
                     cudaStream_t stream) {
  const WaitParams params{.arrived = window.signals().arrived(src),
                          .consumed = window.signals().consumed(src),
                          .control = control(window.id(), window.name(), timeout),
                          .window = window.id(),
                          .peer = src};
  check(launch_wait(params, stream), "wait_signal");
}

WaitControl WaitBoard::control(uint64_t id, const std::string& name,
                               std::chrono::milliseconds timeout) {
  {
    const std::lock_guard lock(mutex_);
    names_.try_emplace(id, name);
  }
  const auto limit = std::chrono::duration_cast<std::chrono::nanoseconds>(timeout);
  return {.failed = block_.failed,
          .record = block_.record,
          .timeout_ns = static_cast<uint64_t>(limit.count())};
}

void WaitBoard::stop() noexcept {
  std::atomic_ref(block_.record->stopped).store(1, std::memory_order_release);
}

std::optional<std::string> WaitBoard::expired() const {
  const WaitRecord& record = *block_.record;
  if (std::atomic_ref(block_.record->expired).load(std::memory_order_acquire) == 0) {
    return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  const auto found = names_.find(record.window);
  const std::string name = found == names_.end() ? "unknown" : found->second;
  const auto within = concat(" within ", record.timeout_ns / 1'000'000, " ms, got ");
  switch (record.kind) {
    case WaitKind::begin:
      return concat(name, ": expected rank ", record.peer, " to begin operation ", record.expected,
                    within, "operation ", record.seen, "; do all ranks make the same calls?");
    case WaitKind::gone:
      return concat(name, ": expected all ranks to take part in operation ", record.expected,
                    ", got one that has given up; its own error says why");
    case WaitKind::rows:
      return describe_unlike_begins(name, Begin::of(static_cast<uint32_t>(record.expected)), "here",
                                    Begin::of(static_cast<uint32_t>(record.seen)), record.peer);
    case WaitKind::chunk:
      return concat(name, ": expected rank ", record.peer, " to do its part of operation ",
                    record.expected, within, "operation ", record.seen,
                    "; do all ranks make the same calls?");
    case WaitKind::step:
      return concat(name, ": expected rank ", record.peer, " to come to step ", record.expected,
                    " of block ", record.block, within, "step ", record.seen,
                    "; do all ranks make the same calls?");
    case WaitKind::apart:
      return concat(
          name,
          ": expected one replay at a time of the graphs of a communicator, got two that "
          "ran at once; replay them on one stream or order the streams by events, or "
          "capture with the hint direct_collectives=off and without algorithm=\"direct\"");
    case WaitKind::signal:
      break;
  }
  return concat("wait_signal: expected signal ", record.expected, " of rank ", record.peer,
                " in window '", name, "'", within, record.seen, "; look at what rank ", record.peer,
                " does");
}

std::string WaitBoard::late() const {
  if (std::atomic_ref(block_.record->is_late).load(std::memory_order_acquire) == 0) return {};
  const WaitRecord::Late late = block_.record->late;
  return concat("rank ", late.peer, " is missing: expected step ", late.expected, " of block ",
                late.block, ", got step ", late.seen);
}

}  // namespace torch_overlap::cuda
