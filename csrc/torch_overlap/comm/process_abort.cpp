#include "torch_overlap/comm/process_abort.h"

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

constexpr auto kStackLimit = std::chrono::seconds(2);

std::atomic<std::chrono::milliseconds> health_check_wait{};
std::atomic<StackWriter> stack_writer{nullptr};

void write_stacks() {
  const StackWriter writer = stack_writer.load();
  if (writer == nullptr) return;
  try {
    if (run_with_timeout(writer, kStackLimit)) return;
    std::fprintf(stderr, "[torch_overlap] no stacks: a thread holds the lock that they need\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[torch_overlap] no stacks: %s\n", error.what());
  }
}

}  // namespace

void abort_process(WorkStatus status, const std::string& message,
                   const std::function<void()>& on_abort) {
  static std::atomic<bool> ending{false};
  if (ending.exchange(true)) {
    while (true) std::this_thread::sleep_for(kHookLimit);
  }
  std::fprintf(stderr, "[torch_overlap] %s\n", message.c_str());
  wait_for_dumps(kDumpLimit);
  if (on_abort) {
    try {
      run_with_timeout(on_abort, kHookLimit);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "[torch_overlap] abort hook: %s\n", error.what());
    }
  }
  const auto wait = health_check_wait.load();
  if (wait.count() > 0) {
    std::fprintf(stderr, "[torch_overlap] waiting %lld ms for a health check\n",
                 static_cast<long long>(wait.count()));
    std::this_thread::sleep_for(wait);
  }
  write_stacks();
  std::fprintf(stderr,
               "[torch_overlap] Aborting process due to %s. To raise an error instead, pass "
               "abort_process_on_timeout_or_error=False to new_comm, or set "
               "TORCHCOMM_ABORT_ON_ERROR=0\n",
               status == WorkStatus::TIMEDOUT ? "timeout" : "error");
  std::fflush(stderr);
  std::abort();
}

void prepare_process_abort(const Env& env) { health_check_wait = env.health_check_wait(); }

void set_stack_writer(StackWriter writer) { stack_writer = writer; }

}  // namespace torch_overlap
