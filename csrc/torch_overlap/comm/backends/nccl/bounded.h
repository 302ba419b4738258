#pragma once

#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/common/cuda/capture.h"

namespace torch_overlap {

// run_with_timeout() for CUDA calls, which may run while another thread captures. `work` runs on a
// thread of its own, and selects the device by cuda::use_device().
inline bool run_bounded_on_cuda(std::function<void()> work, std::chrono::milliseconds limit) {
  return run_with_timeout(
      [work = std::move(work)] {
        const cuda::RelaxedCapture relaxed;
        work();
      },
      limit);
}

}  // namespace torch_overlap
