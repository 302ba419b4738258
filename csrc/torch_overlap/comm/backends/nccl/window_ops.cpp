// One-sided operations between GPUs that map each other's memory, and through NCCL otherwise
// (one_sided.h).
#include "torch_overlap/comm/backends/nccl/one_sided.h"
#include "torch_overlap/comm/backends/nccl/primitives.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/symm/cuda/window_kernels.h"

namespace torch_overlap {
namespace {

// From this size on the copy engine moves a put without an SM. Below it, a kernel starts sooner
// between other kernels.
constexpr size_t kMinCopyEngineBytes = 4 << 20;

// Valid for a window of this backend, which created the object (NcclBackend::open_remote).
OneSided& one_sided(const SymmetricMemory& window) {
  return static_cast<OneSided&>(*window.remote());
}

}  // namespace

void NcclPrimitives::put(SymmetricMemory& window, const at::Tensor& tensor, int dst,
                         int64_t offset) {
  const Piece from = source(tensor);
  if (!window.is_reachable(dst)) {
    return one_sided(window).put(from.data, from.bytes, dst, offset, stream_, has_launched_);
  }
  void* const to = static_cast<std::byte*>(window.pointer(dst)) + offset;
  if (from.bytes == 0 || from.data == to) return;
  if (from.bytes < kMinCopyEngineBytes) {
    cuda::check(cuda::launch_put(to, from.data, from.bytes, stream_), "put");
  } else {
    cuda::check(cudaMemcpyAsync(to, from.data, from.bytes, cudaMemcpyDeviceToDevice, stream_),
                "put");
  }
}

void NcclPrimitives::signal(SymmetricMemory& window, int dst) {
  if (!window.is_reachable(dst)) {
    return one_sided(window).signal(dst, runtime_->wait_monitor(), stream_, has_launched_);
  }
  runtime_->wait_monitor().signal(window, dst, stream_);
}

void NcclPrimitives::wait_signal(SymmetricMemory& window, int src, uint64_t) {
  runtime_->wait_monitor().wait(window, src, timeout_, stream_);
}

}  // namespace torch_overlap
