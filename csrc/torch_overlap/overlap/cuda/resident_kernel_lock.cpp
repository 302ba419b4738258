#include "torch_overlap/overlap/cuda/resident_kernel_lock.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>

#include "torch_overlap/overlap/cuda/last_op_event.h"

namespace torch_overlap::cuda {
namespace {

// Lock of a device. Never destroyed, because operations may run until the process ends.
struct ResidentKernelLock {
  std::mutex mutex;
  LastOpEvent last_op;
};

ResidentKernelLock& resident_kernel_lock(c10::DeviceIndex device) {
  static std::mutex mutex;
  static auto* const all = new std::map<c10::DeviceIndex, ResidentKernelLock>;
  const std::lock_guard lock(mutex);
  const c10::cuda::CUDAGuard guard(device);
  return (*all)[device];
}

class ResidentKernelGuard {
 public:
  ResidentKernelGuard(ResidentKernelLock& lock, c10::cuda::CUDAStream stream)
      : lock_(lock.mutex), last_op_(lock.last_op), stream_(stream) {
    const c10::cuda::CUDAGuard guard(stream.device_index());
    last_op_.make_stream_wait(stream.stream());
  }
  ~ResidentKernelGuard() {
    try {
      const c10::cuda::CUDAGuard guard(stream_.device_index());
      last_op_.record(stream_.stream());
    } catch (const std::exception& error) {  // The device or the capture is broken.
      TORCH_WARN("the end of an operation is not recorded: ", error.what());
    }
  }
  ResidentKernelGuard(const ResidentKernelGuard&) = delete;
  ResidentKernelGuard& operator=(const ResidentKernelGuard&) = delete;

 private:
  const std::lock_guard<std::mutex> lock_;
  LastOpEvent& last_op_;
  const c10::cuda::CUDAStream stream_;
};

}  // namespace

std::shared_ptr<void> acquire_resident_kernel_lock(c10::DeviceIndex device) {
  return std::make_shared<ResidentKernelGuard>(resident_kernel_lock(device),
                                               c10::cuda::getCurrentCUDAStream(device));
}

}  // namespace torch_overlap::cuda
