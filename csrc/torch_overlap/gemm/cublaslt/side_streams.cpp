#include "torch_overlap/gemm/cublaslt/side_streams.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/cuda/compat.h"

namespace torch_overlap::cublaslt {
namespace {

// The capture that a stream is in; false where that is broken.
bool capture_id(cudaStream_t stream, unsigned long long* id) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;
  *id = 0;
  if (cuda::compat::stream_capture_info(stream, &status, id, &graph, &nodes, &edges, &count) !=
      cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  if (status == cudaStreamCaptureStatusNone) *id = 0;
  return status != cudaStreamCaptureStatusInvalidated;
}

// Streams that no call uses now, and events, of one device. A stream stays in the capture that it
// was joined to until that ends: then it serves that capture alone.
struct IdleStreams {
  std::mutex mutex;
  std::vector<std::unique_ptr<cuda::OwnedStream>> streams;
  cuda::EventPool events{cuda::kDefaultEventPoolSize};
};

// Never destroyed: CUDA may be gone before it would be.
IdleStreams& idle_streams(c10::DeviceIndex device) {
  static auto* const mutex = new std::mutex;
  static auto* const by_device = new std::map<c10::DeviceIndex, IdleStreams>;
  const std::lock_guard lock(*mutex);
  return (*by_device)[device];
}

std::unique_ptr<cuda::OwnedStream> take_side_stream(IdleStreams& idle,
                                                    c10::cuda::CUDAStream origin) {
  unsigned long long wanted = 0;
  (void)capture_id(origin, &wanted);
  {
    const std::lock_guard lock(idle.mutex);
    for (auto it = idle.streams.begin(); it != idle.streams.end(); ++it) {
      unsigned long long id = 0;
      if (!capture_id((*it)->get(), &id) || (id != 0 && id != wanted)) continue;
      auto taken = std::move(*it);
      idle.streams.erase(it);
      return taken;
    }
  }
  return std::make_unique<cuda::OwnedStream>(origin.device_index(), /*high_priority=*/false);
}

}  // namespace

SideStreams::SideStreams(c10::cuda::CUDAStream origin, size_t count) : origin_(origin) {
  IdleStreams& idle = idle_streams(origin.device_index());
  for (size_t i = 0; i < count; ++i) streams_.push_back(take_side_stream(idle, origin));
  const auto events = idle.events.take();
  auto status = cudaEventRecord(events.ready, origin);
  for (size_t i = 0; status == cudaSuccess && i < count; ++i) {
    status = cudaStreamWaitEvent(streams_[i]->get(), events.ready, 0);
  }
  idle.events.give(events);
  cuda::check(status, "grouped_gemm: the fork into side streams");
}

void SideStreams::join() {
  if (joined_) return;
  joined_ = true;
  auto& pool = idle_streams(origin_.device_index()).events;
  for (const auto& stream : streams_) {
    const auto events = pool.take();
    auto status = cudaEventRecord(events.end, stream->get());
    if (status == cudaSuccess) status = cudaStreamWaitEvent(origin_, events.end, 0);
    pool.give(events);
    cuda::check(status, "grouped_gemm: the join of side streams");
  }
}

SideStreams::~SideStreams() {
  try {
    join();
    IdleStreams& idle = idle_streams(origin_.device_index());
    const std::lock_guard lock(idle.mutex);
    for (auto& stream : streams_) idle.streams.push_back(std::move(stream));
  } catch (const std::exception& error) {
    TORCH_WARN("grouped_gemm: expected side streams to join, got: ", error.what());
  }
}

}  // namespace torch_overlap::cublaslt
