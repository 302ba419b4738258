#include "torch_overlap/common/cuda/capture.h"

#include <c10/cuda/CUDAStream.h>

#include "torch_overlap/common/capture.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/cuda/compat.h"

namespace torch_overlap::cuda {
namespace {

// The default stream cannot be captured, so it is not queried, and no context is created.
bool current_stream_captures(c10::DeviceIndex device) noexcept {
  if (c10::cuda::device_count() == 0) return false;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
  if (stream == nullptr) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) (void)cudaGetLastError();
  return status != cudaStreamCaptureStatusNone;
}

const CaptureProbeRegistration cuda_probe(c10::kCUDA, current_stream_captures);

}  // namespace

Capture capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");  // the cheap query first
  if (__builtin_expect(status == cudaStreamCaptureStatusNone, 1)) return {};
  TORCH_OVERLAP_CHECK(status == cudaStreamCaptureStatusActive, kState,
                      "CUDA graph capture: expected an intact capture, got one that an earlier "
                      "error invalidated; end it and look at that error");
  Capture capture;
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;
  check(compat::stream_capture_info(stream, &status, &capture.id, &capture.graph, &nodes, &edges,
                                    &count),
        "cudaStreamGetCaptureInfo");
  return capture;
}

void reset_capture_dependencies(cudaStream_t side, cudaStream_t origin) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;
  check(compat::stream_capture_info(origin, &status, &id, &graph, &nodes, &edges, &count),
        "cudaStreamGetCaptureInfo");
  check(compat::stream_set_capture_dependencies(side, nodes, edges, count),
        "cudaStreamUpdateCaptureDependencies");
}

void on_graph_destroyed(cudaGraph_t graph, void (*on_destroyed)(void*), void* argument) {
  cudaUserObject_t object = nullptr;
  cudaError_t status = cudaUserObjectCreate(&object, argument, on_destroyed, /*initialRefcount=*/1,
                                            cudaUserObjectNoDestructorSync);
  if (status != cudaSuccess) {
    on_destroyed(argument);
    check(status, "cudaUserObjectCreate");
  }
  status = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (status != cudaSuccess) {
    (void)cudaUserObjectRelease(object, 1);  // runs the callback
    check(status, "cudaGraphRetainUserObject");
  }
}

}  // namespace torch_overlap::cuda
