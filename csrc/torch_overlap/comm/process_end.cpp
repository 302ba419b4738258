#include "torch_overlap/comm/process_end.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/comm/recorder_dump.h"

namespace torch_overlap {
namespace {

constexpr auto kHookLimit = std::chrono::seconds(10);
constexpr auto kDumpLimit = std::chrono::seconds(10);

}  // namespace

void end_process(WorkStatus status, const std::string& message,
                 const std::function<void()>& on_abort) {
  static std::atomic<bool> ending{false};
  if (ending.exchange(true)) {
    while (true) std::this_thread::sleep_for(kHookLimit);
  }
  std::fprintf(stderr, "[torch_overlap] %s\n", message.c_str());
  wait_for_dumps(kDumpLimit);
  if (on_abort) {
    try {
      run_bounded(on_abort, kHookLimit);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "[torch_overlap] abort hook: %s\n", error.what());
    }
  }
  std::fprintf(stderr, "[torch_overlap] Aborting process due to %s\n",
               status == WorkStatus::TIMEDOUT ? "timeout" : "error");
  std::fflush(stderr);
  std::abort();
}

}  // namespace torch_overlap
