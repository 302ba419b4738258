#include "torch_overlap/gemm/cublaslt/workspace.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <map>
#include <mutex>
#include <utility>

#include "torch_overlap/common/cuda/capture.h"

namespace torch_overlap::cublaslt {
namespace {

constexpr uintptr_t kWorkspaceAlignment = 256;
constexpr int64_t kMiB = 1 << 20;

Workspace aligned_workspace(const at::Tensor& memory) {
  const auto begin = reinterpret_cast<uintptr_t>(memory.data_ptr());
  const uintptr_t end = begin + memory.nbytes();
  const uintptr_t usable = (begin + kWorkspaceAlignment - 1) & ~(kWorkspaceAlignment - 1);
  if (usable >= end) return {};
  // Rounded down, so that views of equal length at different addresses share a plan.
  const auto bytes = static_cast<int64_t>((end - usable) & ~(kWorkspaceAlignment - 1));
  return {.pointer = reinterpret_cast<void*>(usable), .bytes = bytes, .owner = memory};
}

int64_t workspace_bytes() {
  constexpr int64_t kHopperBytes = 32 * kMiB;
  constexpr int64_t kOlderBytes = 4 * kMiB;
  return at::cuda::getCurrentDeviceProperties()->major >= 9 ? kHopperBytes : kOlderBytes;
}

at::Tensor temporary_workspace(c10::cuda::CUDAStream stream) {
  return at::empty({workspace_bytes()}, at::TensorOptions(at::kByte).device(stream.device()));
}

// Not from torch's caching allocator, which may return memory of a graph's pool even when nothing
// is being captured (the warm-up of torch.compile's graphs). Undefined if no memory is left outside
// of that allocator.
at::Tensor persistent_workspace(c10::cuda::CUDAStream stream) {
  const cuda::RelaxedCapture relaxed;  // another thread may be capturing
  void* memory = nullptr;
  if (cudaMalloc(&memory, workspace_bytes()) != cudaSuccess) {
    (void)cudaGetLastError();
    return {};
  }
  return at::from_blob(memory, {workspace_bytes()},
                       at::TensorOptions(at::kByte).device(stream.device()));
}

struct CachedWorkspaces {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceIndex, cudaStream_t>, at::Tensor> by_stream;
};

// Never destroyed, because CUDA may be unloaded first.
CachedWorkspaces& cached_workspaces() {
  static auto* const cached = new CachedWorkspaces;
  return *cached;
}

}  // namespace

Workspace workspace_for(const GemmArgs& args, c10::cuda::CUDAStream stream) {
  if (args.workspace.defined()) return aligned_workspace(args.workspace);
  if (cuda::capture_of(stream)) return aligned_workspace(temporary_workspace(stream));
  CachedWorkspaces& cached = cached_workspaces();
  const std::pair key(stream.device_index(), stream.stream());
  {
    const std::lock_guard lock(cached.mutex);
    const auto found = cached.by_stream.find(key);
    if (found != cached.by_stream.end()) return aligned_workspace(found->second);
  }
  // If two threads on one stream create a workspace, the second one's is dropped.
  const auto made = persistent_workspace(stream);
  if (!made.defined()) return aligned_workspace(temporary_workspace(stream));
  const std::lock_guard lock(cached.mutex);
  return aligned_workspace(cached.by_stream.try_emplace(key, made).first->second);
}

}  // namespace torch_overlap::cublaslt
