// One-sided operations between GPUs that see each other's memory.
#include "torch_overlap/comm/backends/nccl/primitives.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/symm/cuda/window_kernels.h"

namespace torch_overlap {
namespace {

// From here on the copy engine moves a put, and no SM. Below, a kernel starts sooner between
// kernels: benchmarks/window.py compares it with a plain copy.
constexpr size_t kCopyEngineFrom = 4 << 20;

}  // namespace

void NcclPrimitives::put(SymmetricMemory& window, const at::Tensor& tensor, int dst,
                         int64_t offset) {
  const Piece from = source(tensor);
  void* const to = static_cast<std::byte*>(window.pointer(dst)) + offset;
  if (from.bytes == 0 || from.data == to) return;
  if (from.bytes < kCopyEngineFrom) {
    cuda::check(cuda::launch_put(to, from.data, from.bytes, stream_), "put");
  } else {
    cuda::check(cudaMemcpyAsync(to, from.data, from.bytes, cudaMemcpyDeviceToDevice, stream_),
                "put");
  }
}

void NcclPrimitives::signal(SymmetricMemory& window, int dst) {
  runtime_->waits().signal(window, dst, stream_);
}

void NcclPrimitives::wait_signal(SymmetricMemory& window, int src, uint64_t) {
  runtime_->waits().wait(window, src, timeout_, stream_);
}

}  // namespace torch_overlap
