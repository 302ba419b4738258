#include "torch_overlap/overlap/cuda/turns.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <optional>

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {
namespace {

// Of a device. Never destroyed: operations may end with the process.
struct Turns {
  struct End {
    cudaEvent_t event = nullptr;
    std::optional<unsigned long long> capture;  // that it is of, 0 for none; empty: of nothing yet
  };
  std::mutex mutex;
  End eager;
  End captured;  // of the last capture
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
      : lock_(turns.mutex),
        stream_(stream),
        capture_(capture_of(stream.stream()).id),
        end_(capture_ == 0 ? turns.eager : turns.captured) {
    const c10::cuda::CUDAGuard guard(stream.device_index());
    if (end_.event == nullptr) {
      const RelaxedCapture relaxed;
      check(cudaEventCreateWithFlags(&end_.event, cudaEventDisableTiming),
            "cudaEventCreateWithFlags");
    }
    if (end_.capture == capture_) {
      check(cudaStreamWaitEvent(stream.stream(), end_.event), "cudaStreamWaitEvent");
    }
  }
  ~Turn() {
    end_.capture.reset();
    try {
      const c10::cuda::CUDAGuard guard(stream_.device_index());
      check(cudaEventRecord(end_.event, stream_.stream()), "cudaEventRecord");
      end_.capture = capture_;
    } catch (const std::exception& error) {  // the device is broken, or the capture
      TORCH_WARN("the end of an operation is not recorded: ", error.what());
    }
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  const std::lock_guard<std::mutex> lock_;
  const c10::cuda::CUDAStream stream_;
  const unsigned long long capture_;  // 0: none
  Turns::End& end_;
};

}  // namespace

std::shared_ptr<void> take_turn(c10::DeviceIndex device) {
  return std::make_shared<Turn>(turns_of(device), c10::cuda::getCurrentCUDAStream(device));
}

}  // namespace torch_overlap::cuda
