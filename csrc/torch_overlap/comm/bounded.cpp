#include "torch_overlap/comm/bounded.h"

#include <future>
#include <thread>

#include "torch_overlap/base/interrupt.h"

namespace torch_overlap {
namespace {

std::future<void> start(std::function<void()> work) {
  std::packaged_task<void()> task(std::move(work));
  auto done = task.get_future();
  std::thread(std::move(task)).detach();
  return done;
}

}  // namespace

bool run_with_timeout(std::function<void()> work, std::chrono::milliseconds limit) {
  auto done = start(std::move(work));
  if (done.wait_for(clamp_timeout(limit)) != std::future_status::ready) return false;
  done.get();
  return true;
}

bool run_interruptibly(std::function<void()> work, std::chrono::milliseconds limit) {
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + clamp_timeout(limit);
  auto done = start(std::move(work));
  while (done.wait_until(std::min(until, Clock::now() + kInterruptPeriod)) !=
         std::future_status::ready) {
    if (Clock::now() >= until) return false;
    check_interrupt();
  }
  done.get();
  return true;
}

}  // namespace torch_overlap
