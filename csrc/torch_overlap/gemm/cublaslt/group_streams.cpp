#include "torch_overlap/gemm/cublaslt/group_streams.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>

namespace torch_overlap::cublaslt {
namespace {

struct IdleStreams {
  std::mutex mutex;
  std::map<c10::DeviceIndex, std::vector<std::unique_ptr<cuda::SideStreams>>> by_device;
};

// Never destroyed, because CUDA may be unloaded first.
IdleStreams& idle_streams() {
  static auto* const idle = new IdleStreams;
  return *idle;
}

std::unique_ptr<cuda::SideStreams> take_streams(c10::DeviceIndex device) {
  IdleStreams& idle = idle_streams();
  {
    const std::lock_guard lock(idle.mutex);
    auto& streams = idle.by_device[device];
    if (!streams.empty()) {
      auto taken = std::move(streams.back());
      streams.pop_back();
      return taken;
    }
  }
  return std::make_unique<cuda::SideStreams>(
      device, std::vector<cuda::OwnedStream::Priority>(GroupStreams::kMaxStreams));
}

}  // namespace

GroupStreams::GroupStreams(c10::cuda::CUDAStream origin, size_t count)
    : count_(count), streams_(take_streams(origin.device_index())) {
  streams_->fork(origin);
}

void GroupStreams::join() {
  if (joined_) return;
  joined_ = true;
  streams_->join();
}

GroupStreams::~GroupStreams() {
  try {
    join();
    IdleStreams& idle = idle_streams();
    const std::lock_guard lock(idle.mutex);
    idle.by_device[streams_->origin().device_index()].push_back(std::move(streams_));
  } catch (const std::exception& error) {
    TORCH_WARN("grouped_gemm: expected side streams to join, got: ", error.what());
  }
}

}  // namespace torch_overlap::cublaslt
