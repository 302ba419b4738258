// Process-wide state that a fork uses while other threads of its parent hold its locks, and calls
// that a fork may make on its parent's works.

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>

#include "base/in_fork.h"
#include "comm/local_ranks.h"
#include "torch_overlap/comm/recorder.h"
#include "torch_overlap/comm/registry.h"
#include "torch_overlap/comm/window.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

void use_memory() { (void)symmetric_empty({4}, at::kFloat, c10::kCPU); }

void use_names() {
  (void)comm_names();
  (void)live_comms();
}

// Uses the records like a communicator, but without its threads, which some tools cannot follow
// into a fork.
void use_records() {
  const auto comm = make_comm_record("forked", "fake", 0, {0});
  Call call;
  call.name = OpName::barrier;
  auto& recorder = FlightRecorder::of_process();
  recorder.add(std::make_shared<CallRecord>(call, comm));
  (void)recorder.records();
  comm->failed("for the test");
  (void)comm_records();
}

void use_hints() { (void)op_hints("op", {{"fork_test", "unknown"}}); }

std::string fresh_name() {
  static std::atomic<int> count{0};
  return "fork_test" + std::to_string(count++);
}

void use_fake() {
  const Comm comm = TorchComm::create("fake", c10::kCPU, fresh_name(), {}, RankAndSize{0, 2});
  comm->all_reduce(at::ones({4}), RedOpType::SUM, /*async_op=*/false);
  comm->finalize();
}

void use_windows() {
  CommOptions options;
  options.store = c10::make_intrusive<c10d::HashStore>();
  const Comm comm = TorchComm::create("local", c10::kCPU, fresh_name(), options, RankAndSize{0, 1});
  const auto window = comm->new_window(symmetric_empty({4}, at::kFloat, c10::kCPU));
  (void)window_names();
  window->tensor_deregister();
  comm->finalize();
}

struct Use {
  const char* name;
  void (*run)();
};

// Sanitizers have locks of their own, for example of their allocator, which a fork may find locked.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kCanFork = false;
#else
constexpr bool kCanFork = true;
#endif

class Fork : public ::testing::TestWithParam<Use> {
 protected:
  void SetUp() override {
    if (!kCanFork) GTEST_SKIP() << "the sanitizer's own locks";
  }
};

TEST_P(Fork, GoesOnWhereTheParentsThreadsWere) {
  const auto use = GetParam().run;
  std::atomic<bool> stop{false};
  std::vector<std::thread> others;
  for (int i = 0; i < 2; ++i) {
    others.emplace_back([&] {
      while (!stop) use();
    });
  }
  const auto use_it = [use] {
    use();
    return true;
  };
  for (int turn = 0; turn < 100 && !HasFailure(); ++turn) EXPECT_EQ(in_fork(use_it), 0) << turn;
  stop = true;
  for (auto& other : others) other.join();
}

INSTANTIATE_TEST_SUITE_P(Of, Fork,
                         ::testing::Values(Use{"Memory", &use_memory}, Use{"Names", &use_names},
                                           Use{"Records", &use_records}, Use{"Hints", &use_hints},
                                           Use{"Communicators", &use_fake},
                                           Use{"Windows", &use_windows}),
                         [](const auto& info) { return std::string(info.param.name); });

// The fork makes no assertion: another thread may have held gtest's lock.
bool is_refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.kind() == ErrorKind::kState;
  }
  return false;
}

TEST(ForkOfWorks, AsksWithoutWaitingAndIsRefusedAWait) {
  if (!kCanFork) GTEST_SKIP() << "the sanitizer's own locks";
  run_local_ranks(2, [](const Comm& comm) {
    for (int turn = 0; turn < 40; ++turn) {
      std::vector<WorkPtr> works;
      for (int i = 0; i < 8; ++i) {
        works.push_back(comm->all_reduce(at::ones({64}), RedOpType::SUM, /*async_op=*/true));
      }
      const auto ask = [&works] {
        return std::all_of(works.begin(), works.end(), [](const WorkPtr& work) {
          return work->exception() == nullptr && work->status() != WorkStatus::ERROR &&
                 is_refused([&] { work->wait(); }) &&
                 is_refused([&] { work->on_completion([](const auto&) {}); });
        });
      };
      EXPECT_EQ(in_fork(ask), 0);
      for (const WorkPtr& work : works) work->wait();
    }
  });
}

}  // namespace
}  // namespace torch_overlap
