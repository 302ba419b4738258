#include "torch_overlap/jax/stream.h"

#include <ATen/Context.h>
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <exception>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/common/capture.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/cuda/compat.h"

namespace torch_overlap::jax {
namespace {

// While it exists, what this thread allocates on a device comes from a pool that is never freed:
// replays of a graph use the memory that its calls were captured with. All graphs share the pool,
// since XLA replays those of a device one after the other.
class CapturedMemory {
 public:
  explicit CapturedMemory(c10::DeviceIndex device) : device_(device) {
    c10::cuda::CUDACachingAllocator::beginAllocateToPool(
        device_, pool(), [thread = std::this_thread::get_id()](cudaStream_t) {
          return std::this_thread::get_id() == thread;
        });
  }
  ~CapturedMemory() { c10::cuda::CUDACachingAllocator::endAllocateToPool(device_, pool()); }
  CapturedMemory(const CapturedMemory&) = delete;
  CapturedMemory& operator=(const CapturedMemory&) = delete;

 private:
  static c10::MempoolId_t pool() {
    static const auto id = at::cuda::MemPool::graph_pool_handle();
    return id;
  }

  c10::DeviceIndex device_;
};

// The stream on which this thread captures: no other work may be on it.
cudaStream_t capture_stream() {
  static thread_local const cudaStream_t stream = [] {
    const cuda::RelaxedCapture relaxed;
    cudaStream_t made = nullptr;
    cuda::check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreate");
    return made;
  }();
  return stream;
}

cudaGraph_t capture(c10::DeviceIndex device, const std::function<void()>& body) {
  const cudaStream_t stream = capture_stream();
  cuda::check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
              "cudaStreamBeginCapture");
  std::exception_ptr error;
  try {
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(stream, device));
    const CapturedMemory memory(device);
    body();
  } catch (...) {
    error = std::current_exception();
  }
  cudaGraph_t graph = nullptr;
  const auto status = cudaStreamEndCapture(stream, &graph);
  if (error) {
    if (status == cudaSuccess) (void)cudaGraphDestroy(graph);
    (void)cudaGetLastError();
    std::rethrow_exception(error);
  }
  cuda::check(status, "cudaStreamEndCapture");
  return graph;
}

// Makes `graph` the next node of the graph that is being captured on `stream`.
void append(cudaStream_t stream, cudaGraph_t graph) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t captured = nullptr;
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;
  cuda::check(
      cuda::compat::stream_capture_info(stream, &status, &id, &captured, &nodes, &edges, &count),
      "cudaStreamGetCaptureInfo");
  cudaGraphNode_t node = nullptr;
  cuda::check(cudaGraphAddChildGraphNode(&node, captured, nodes, count, graph),
              "cudaGraphAddChildGraphNode");
  cuda::check(cuda::compat::stream_set_capture_dependencies(stream, &node, nullptr, 1),
              "cudaStreamUpdateCaptureDependencies");
}

// XLA's command buffer has the graph that was appended last, and those used before it go first.
class CudaGraphs final : public CapturedGraphs {
 public:
  CudaGraphs() = default;
  ~CudaGraphs() override {
    for (const auto& [addresses, graph] : kept_) (void)cudaGraphDestroy(graph);
  }
  CudaGraphs(const CudaGraphs&) = delete;
  CudaGraphs& operator=(const CudaGraphs&) = delete;

  void append_to(cudaStream_t stream, c10::DeviceIndex device, const Addresses& addresses,
                 const std::function<void()>& body) {
    constexpr size_t kMaxGraphs = 16;
    const std::lock_guard lock(mutex_);
    const auto found =
        std::ranges::find(kept_, addresses, &std::pair<Addresses, cudaGraph_t>::first);
    if (found == kept_.end()) {
      kept_.emplace_front(addresses, capture(device, body));
    } else {
      kept_.splice(kept_.begin(), kept_, found);
    }
    append(stream, kept_.front().second);
    if (kept_.size() <= kMaxGraphs) return;
    (void)cudaGraphDestroy(kept_.back().second);
    kept_.pop_back();
  }

 private:
  std::mutex mutex_;
  std::list<std::pair<Addresses, cudaGraph_t>> kept_;  // the latest first
};

}  // namespace

std::unique_ptr<CapturedGraphs> make_captured_graphs() { return std::make_unique<CudaGraphs>(); }

void run_on_stream(const ffi::Context& context, c10::Device device,
                   const std::function<void()>& body, CapturedGraphs* graphs,
                   const Addresses& addresses) {
  if (!device.is_cuda()) return body();
  const auto stream = context.get<ffi::PlatformStream<cudaStream_t>>();
  if (!stream.has_value()) fail(ErrorKind::kRuntime, stream.error().message());
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(*stream, device.index()));
  if (graphs == nullptr || !is_capturing(device)) return body();
  static_cast<CudaGraphs*>(graphs)->append_to(*stream, device.index(), addresses, body);
}

c10::Device stream_device(const ffi::Context& context, int ordinal) {
  if (!context.get<ffi::PlatformStream<cudaStream_t>>().has_value()) return {c10::kCPU};
  prepare_device(c10::kCUDA);
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(ordinal)};
}

void prepare_device(c10::DeviceType type) {
  TORCH_OVERLAP_CHECK(type == c10::kCPU || type == c10::kCUDA, kUnsupported,
                      "bootstrap: expected CPU or CUDA devices, got ",
                      c10::DeviceTypeName(type, /*lower_case=*/true), ". Use one of them.");
  if (type == c10::kCUDA) at::globalContext().lazyInitDevice(type);
}

}  // namespace torch_overlap::jax
