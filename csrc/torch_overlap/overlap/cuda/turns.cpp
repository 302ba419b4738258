#include "torch_overlap/overlap/cuda/turns.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>

#include "torch_overlap/overlap/cuda/ends.h"

namespace torch_overlap::cuda {
namespace {

// Of a device. Never destroyed: operations may end with the process.
struct Turns {
  std::mutex mutex;
  Ends ends;
};

Turns& turns_of(c10::DeviceIndex device) {
  static std::mutex mutex;
  static auto* const all = new std::map<c10::DeviceIndex, Turns>;
  const std::lock_guard lock(mutex);
  const c10::cuda::CUDAGuard guard(device);
  return (*all)[device];
}

class Turn {
 public:
  Turn(Turns& turns, c10::cuda::CUDAStream stream)
      : lock_(turns.mutex), ends_(turns.ends), stream_(stream) {
    const c10::cuda::CUDAGuard guard(stream.device_index());
    ends_.put_behind(stream.stream());
  }
  ~Turn() {
    try {
      const c10::cuda::CUDAGuard guard(stream_.device_index());
      ends_.record(stream_.stream());
    } catch (const std::exception& error) {  // the device is broken, or the capture
      TORCH_WARN("the end of an operation is not recorded: ", error.what());
    }
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  const std::lock_guard<std::mutex> lock_;
  Ends& ends_;
  const c10::cuda::CUDAStream stream_;
};

}  // namespace

std::shared_ptr<void> take_turn(c10::DeviceIndex device) {
  return std::make_shared<Turn>(turns_of(device), c10::cuda::getCurrentCUDAStream(device));
}

}  // namespace torch_overlap::cuda
