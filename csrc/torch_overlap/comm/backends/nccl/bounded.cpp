#include "torch_overlap/comm/backends/nccl/bounded.h"

#include <future>
#include <thread>

#include "torch_overlap/common/cuda/capture.h"

namespace torch_overlap {

bool run_bounded(std::function<void()> work, std::chrono::milliseconds limit) {
  std::packaged_task<void()> task(std::move(work));
  auto done = task.get_future();
  std::thread([task = std::move(task)]() mutable {
    const cuda::RelaxedCapture relaxed;
    task();
  }).detach();
  if (done.wait_for(bounded_timeout(limit)) != std::future_status::ready) return false;
  done.get();
  return true;
}

}  // namespace torch_overlap
