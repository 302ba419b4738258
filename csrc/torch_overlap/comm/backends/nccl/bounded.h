#pragma once

#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/common/cuda/capture.h"

namespace torch_overlap {

// run_bounded() for calls into CUDA, which may be made while another thread captures. `work` has a
// thread to itself, and chooses the device by cuda::use_device().
inline bool run_bounded_on_cuda(std::function<void()> work, std::chrono::milliseconds limit) {
  return run_bounded(
      [work = std::move(work)] {
        const cuda::RelaxedCapture relaxed;
        work();
      },
      limit);
}

}  // namespace torch_overlap
