#include "torch_overlap/overlap/cuda/turns.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {
namespace {

// Of a device. Never destroyed: operations may end with the process.
struct Turns {
  std::mutex mutex;
  cudaEvent_t end = nullptr;  // of the last one; null: there was none
  cudaStream_t stream = nullptr;
};

Turns& turns_of(c10::DeviceIndex device) {
  static std::mutex mutex;
  static auto* const all = new std::map<c10::DeviceIndex, Turns>;
  const std::lock_guard lock(mutex);
  return (*all)[device];
}

class Turn {
 public:
  Turn(Turns& turns, c10::cuda::CUDAStream stream)
      : turns_(turns), lock_(turns.mutex), stream_(stream) {
    const c10::cuda::CUDAGuard guard(stream.device_index());
    if (turns.end == nullptr) {
      check(cudaEventCreateWithFlags(&turns.end, cudaEventDisableTiming),
            "cudaEventCreateWithFlags");
    } else if (turns.stream != stream.stream()) {
      check(cudaStreamWaitEvent(stream.stream(), turns.end), "cudaStreamWaitEvent");
    }
  }
  ~Turn() {
    try {
      const c10::cuda::CUDAGuard guard(stream_.device_index());
      check(cudaEventRecord(turns_.end, stream_.stream()), "cudaEventRecord");
      turns_.stream = stream_.stream();
    } catch (const std::exception& error) {
      TORCH_WARN("the end of an operation cannot be recorded: ", error.what());
    }
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Turns& turns_;
  const std::lock_guard<std::mutex> lock_;
  const c10::cuda::CUDAStream stream_;
};

}  // namespace

std::shared_ptr<void> take_turn(c10::DeviceIndex device) {
  const auto stream = c10::cuda::getCurrentCUDAStream(device);
  if (capture_of(stream.stream())) return nullptr;
  const RelaxedCapture relaxed;  // of another thread
  return std::make_shared<Turn>(turns_of(device), stream);
}

}  // namespace torch_overlap::cuda
