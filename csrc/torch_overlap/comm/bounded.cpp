#include "torch_overlap/comm/bounded.h"

#include <future>
#include <thread>

namespace torch_overlap {

bool run_bounded(std::function<void()> work, std::chrono::milliseconds limit) {
  std::packaged_task<void()> task(std::move(work));
  auto done = task.get_future();
  std::thread(std::move(task)).detach();
  if (done.wait_for(bounded_timeout(limit)) != std::future_status::ready) return false;
  done.get();
  return true;
}

}  // namespace torch_overlap
