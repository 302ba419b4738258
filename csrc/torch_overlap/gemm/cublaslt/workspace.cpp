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

Workspace aligned(const at::Tensor& memory) {
  const auto begin = reinterpret_cast<uintptr_t>(memory.data_ptr());
  const uintptr_t end = begin + memory.nbytes();
  const uintptr_t usable = (begin + kWorkspaceAlignment - 1) & ~(kWorkspaceAlignment - 1);
  if (usable >= end) return {};
  // Whole units: views of one length at different addresses have one plan.
  const auto bytes = static_cast<int64_t>((end - usable) & ~(kWorkspaceAlignment - 1));
  return {.pointer = reinterpret_cast<void*>(usable), .bytes = bytes, .keeper = memory};
}

int64_t workspace_bytes() {
  constexpr int64_t kHopperBytes = 32 * kMiB;
  constexpr int64_t kOlderBytes = 4 * kMiB;
  return at::cuda::getCurrentDeviceProperties()->major >= 9 ? kHopperBytes : kOlderBytes;
}

at::Tensor workspace_of_call(c10::cuda::CUDAStream stream) {
  return at::empty({workspace_bytes()}, at::TensorOptions(at::kByte).device(stream.device()));
}

// Not from torch's caching allocator, which may hand out memory of a graph's pool also while
// nothing is captured (the warm-up of torch.compile's graphs). Undefined where there is no memory
// left beside what that allocator holds.
at::Tensor lasting_workspace(c10::cuda::CUDAStream stream) {
  const cuda::RelaxedCapture relaxed;  // another thread may capture
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

// Never destroyed: CUDA may be gone before it would be.
CachedWorkspaces& cached_workspaces() {
  static auto* const cached = new CachedWorkspaces;
  return *cached;
}

}  // namespace

Workspace workspace_for(const GemmArgs& args, c10::cuda::CUDAStream stream) {
  if (args.workspace.defined()) return aligned(args.workspace);
  if (cuda::capture_of(stream)) return aligned(workspace_of_call(stream));
  CachedWorkspaces& cached = cached_workspaces();
  const std::pair key(stream.device_index(), stream.stream());
  {
    const std::lock_guard lock(cached.mutex);
    const auto found = cached.by_stream.find(key);
    if (found != cached.by_stream.end()) return aligned(found->second);
  }
  // Of two threads on one stream the second loses its own.
  const auto made = lasting_workspace(stream);
  if (!made.defined()) return aligned(workspace_of_call(stream));
  const std::lock_guard lock(cached.mutex);
  return aligned(cached.by_stream.try_emplace(key, made).first->second);
}

}  // namespace torch_overlap::cublaslt
