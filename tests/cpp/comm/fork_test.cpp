// A fork while other threads of its parent are in what all communicators share: it makes and ends
// communicators of its own.

#include <sys/wait.h>
#include <unistd.h>

#include "comm/local_ranks.h"
#include "torch_overlap/comm/recorder.h"
#include "torch_overlap/comm/registry.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

void use_memory() { (void)symmetric_empty({4}, at::kFloat, c10::kCPU); }

void use_names() {
  (void)comm_names();
  (void)live_comms();
}

// As a communicator does it, without the threads that some tools cannot follow into a fork.
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

void use_hints() { (void)op_hints({{"fork_test", "unknown"}}); }

void use_comm() {
  static std::atomic<int> count{0};
  const auto name = "fork_test" + std::to_string(count++);
  const Comm comm = TorchComm::create("fake", c10::kCPU, name, {}, RankAndSize{0, 2});
  comm->all_reduce(at::ones({4}), RedOpType::SUM, /*async_op=*/false);
  comm->finalize();
}

struct Use {
  const char* name;
  void (*run)();
};

class Fork : public ::testing::TestWithParam<Use> {};

TEST_P(Fork, GoesOnWhereTheParentsThreadsWere) {
  const auto use = GetParam().run;
  use();  // what is made once is there
  std::atomic<bool> stop{false};
  std::vector<std::thread> others;
  for (int i = 0; i < 2; ++i) {
    others.emplace_back([&] {
      while (!stop) use();
    });
  }
  for (int turn = 0; turn < 100; ++turn) {
    const pid_t pid = fork();
    if (pid == 0) {
      alarm(20);
      use();
      _exit(0);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0) << "fork " << turn << (WIFSIGNALED(status) ? " did not end" : "");
    if (status != 0) break;
  }
  stop = true;
  for (auto& other : others) other.join();
}

INSTANTIATE_TEST_SUITE_P(Of, Fork,
                         ::testing::Values(Use{"Memory", &use_memory}, Use{"Names", &use_names},
                                           Use{"Records", &use_records}, Use{"Hints", &use_hints},
                                           Use{"Communicators", &use_comm}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace torch_overlap
