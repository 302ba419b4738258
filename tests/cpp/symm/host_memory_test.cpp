// Symmetric memory of CPU ranks: threads of one process, and processes made by fork.
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "symm/thread_ranks.h"
#include "torch_overlap/symm/allocator.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

// Two ranks that are processes, connected by a pair of pipes.
class PipeBootstrap final : public Bootstrap {
 public:
  PipeBootstrap(int rank, int read_end, int write_end)
      : Bootstrap(rank, 2, milliseconds(10'000)), read_end_(read_end), write_end_(write_end) {}
  std::vector<std::string> all_gather(const std::string& mine) override {
    const uint64_t length = mine.size();
    put(&length, sizeof(length));
    put(mine.data(), mine.size());
    uint64_t other_length = 0;
    get(&other_length, sizeof(other_length));
    std::string other(other_length, '\0');
    get(other.data(), other.size());
    return rank() == 0 ? std::vector{mine, other} : std::vector{other, mine};
  }

 private:
  void put(const void* data, size_t bytes) {
    TORCH_OVERLAP_CHECK(write(write_end_, data, bytes) == static_cast<ssize_t>(bytes), kRuntime,
                        "pipe");
  }
  void get(void* data, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
      const ssize_t got = read(read_end_, static_cast<char*>(data) + done, bytes - done);
      TORCH_OVERLAP_CHECK(got > 0, kRuntime, "pipe");
      done += got;
    }
  }
  int read_end_;
  int write_end_;
};

TEST(SymmetricMemory, IsZeroedAndOfItsSizeAndDtype) {
  const auto x = symmetric_empty({3, 5}, at::kInt, c10::kCPU);
  EXPECT_EQ(x.sizes(), at::IntArrayRef({3, 5}));
  EXPECT_TRUE(at::equal(x, at::zeros({3, 5}, at::kInt)));
  EXPECT_EQ(symmetric_empty({0, 5}, at::kInt, c10::kCPU).numel(), 0);
}

TEST(SymmetricMemory, ThreadsSeeEachOthersTensorsWithoutACopy) {
  run_threads(3, [](int rank, ThreadExchange& board) {
    ThreadBootstrap bootstrap(board, rank, 3);
    auto x = rank == 1 ? at::full({4}, 1.0) : symmetric_empty({4}, at::kFloat, c10::kCPU);
    x.fill_(rank);
    const auto memory = SymmetricMemory::rendezvous(bootstrap, request_of(x));
    EXPECT_EQ(memory->bytes(), 16U);
    EXPECT_EQ(memory->pointer(rank), x.data_ptr());
    std::vector<at::Tensor> views;
    for (int peer = 0; peer < 3; ++peer) views.push_back(memory->view(peer, {4}, at::kFloat));
    bootstrap.barrier();
    x.reset();
    bootstrap.barrier();
    for (int peer = 0; peer < 3; ++peer) {
      EXPECT_TRUE(at::equal(views[peer], at::full({4}, static_cast<double>(peer), at::kFloat)));
    }
  });
}

TEST(SymmetricMemory, CountsGoToTheSourcesOwnLine) {
  run_threads(2, [](int rank, ThreadExchange& board) {
    ThreadBootstrap bootstrap(board, rank, 2);
    const auto memory = SymmetricMemory::rendezvous(
        bootstrap, request_of(symmetric_empty({1}, at::kFloat, c10::kCPU)));
    const auto& signals = memory->signals();
    for (int peer = 0; peer < 2; ++peer) {
      EXPECT_EQ(*signals.arrived(peer), 0U);
      EXPECT_EQ(*signals.consumed(peer), 0U);
    }
    bootstrap.barrier();
    *signals.to(1 - rank) = 40U + rank;
    *signals.to(rank) = 50U + rank;
    bootstrap.barrier();
    EXPECT_EQ(*signals.arrived(1 - rank), 40U + (1 - rank));
    EXPECT_EQ(*signals.arrived(rank), 50U + rank);
    EXPECT_EQ(*signals.consumed(0) + *signals.consumed(1), 0U);
  });
}

TEST(SymmetricMemory, ThrowsOnEveryRankWhatIsWrongOnOne) {
  run_threads(3, [](int rank, ThreadExchange& board) {
    ThreadBootstrap bootstrap(board, rank, 3);
    auto request = request_of(symmetric_empty({4}, at::kFloat, c10::kCPU));
    if (rank == 2) request.fault = {ErrorKind::kType, "test: expected a, got b"};
    auto error = thrown_error([&] { SymmetricMemory::rendezvous(bootstrap, request); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), ErrorKind::kType);
    EXPECT_STREQ(error->what(), rank == 2
                                    ? "test: expected a, got b"
                                    : "test: rank 2 could not take part: test: expected a, got b");

    request = request_of(symmetric_empty({rank == 0 ? 4 : 5}, at::kFloat, c10::kCPU));
    error = thrown_error([&] { SymmetricMemory::rendezvous(bootstrap, request); });
    ASSERT_TRUE(error);
    EXPECT_STREQ(error->what(),
                 "test: expected memory of the same size on all ranks, got 16 bytes on rank 0 and "
                 "20 on rank 1");

    request = request_of(symmetric_empty({4}, at::kFloat, c10::kCPU));
    request.digest = rank == 1 ? "apples" : "pears";
    error = thrown_error([&] { SymmetricMemory::rendezvous(bootstrap, request); });
    ASSERT_TRUE(error);
    EXPECT_STREQ(error->what(),
                 "test: expected the same on all ranks, got pears on rank 0 and "
                 "apples on rank 1");
  });
}

TEST(SymmetricMemory, ARankThatDoesNotComeIsATimeout) {
  ThreadExchange board(2);
  ThreadBootstrap bootstrap(board, 0, 2, milliseconds(50));
  const auto error = thrown_error([&] {
    SymmetricMemory::rendezvous(bootstrap, request_of(symmetric_empty({4}, at::kFloat, c10::kCPU)));
  });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kTimeout);
}

// Runs `body` as rank 1 in a forked child; its return value is the child's exit status.
struct Child {
  int to_child[2];
  int to_parent[2];
  pid_t pid = -1;

  explicit Child(const std::function<bool(Bootstrap&)>& body) {
    EXPECT_EQ(pipe(to_child), 0);
    EXPECT_EQ(pipe(to_parent), 0);
    pid = fork();
    if (pid != 0) return;
    bool ok = false;
    try {
      PipeBootstrap bootstrap(1, to_child[0], to_parent[1]);
      ok = body(bootstrap);
    } catch (const std::exception& error) {
      fprintf(stderr, "child: %s\n", error.what());
    }
    _exit(ok ? 0 : 1);
  }
  PipeBootstrap bootstrap() const { return {0, to_parent[0], to_child[1]}; }
  int join() const {
    int status = -1;
    waitpid(pid, &status, 0);
    return status;
  }
  ~Child() {
    for (const int end : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) close(end);
  }
};

TEST(SymmetricMemory, ProcessesMapEachOthersMemory) {
  const auto body = [](Bootstrap& bootstrap) {
    const int me = bootstrap.rank();
    const auto arena = symmetric_empty({1 << 16}, at::kInt, c10::kCPU);
    const auto x = arena.narrow(0, 1000 * (me + 1), 4096);  // at another offset on each rank
    x.fill_(me + 7);
    const auto memory = SymmetricMemory::rendezvous(bootstrap, request_of(x));
    const auto other = memory->view(1 - me, {4096}, at::kInt);
    bool ok = at::equal(other, at::full({4096}, 1 - me + 7, at::kInt));
    bootstrap.barrier();
    other.fill_(me + 70);
    bootstrap.barrier();
    ok = ok && at::equal(x, at::full({4096}, 1 - me + 70, at::kInt));
    // The memory around x is unchanged.
    ok = ok && arena.ne(0).sum().item<int64_t>() == 4096;
    return ok;
  };
  const Child child(body);
  auto bootstrap = child.bootstrap();
  EXPECT_TRUE(body(bootstrap));
  EXPECT_EQ(child.join(), 0);
}

TEST(SymmetricMemory, OutlivesTheProcessThatMadeIt) {
  const Child child([](Bootstrap& bootstrap) {
    const auto x = symmetric_empty({1024}, at::kInt, c10::kCPU);
    x.fill_(5);
    const auto memory = SymmetricMemory::rendezvous(bootstrap, request_of(x));
    bootstrap.barrier();
    (void)kill(getpid(), SIGKILL);
    return true;
  });
  auto bootstrap = child.bootstrap();
  auto memory = SymmetricMemory::rendezvous(
      bootstrap, request_of(symmetric_empty({1024}, at::kInt, c10::kCPU)));
  const auto other = memory->view(1, {1024}, at::kInt);
  memory.reset();
  bootstrap.barrier();
  EXPECT_TRUE(WIFSIGNALED(child.join()));
  EXPECT_TRUE(at::equal(other, at::full({1024}, 5, at::kInt)));
}

TEST(SymmetricMemory, PrivateMemoryOfAProcessIsRefusedOnBothSides) {
  const auto body = [](Bootstrap& bootstrap) {
    const auto x =
        bootstrap.rank() == 0 ? at::zeros({4}) : symmetric_empty({4}, at::kFloat, c10::kCPU);
    const auto error = thrown_error([&] { SymmetricMemory::rendezvous(bootstrap, request_of(x)); });
    return error && error->kind() == ErrorKind::kUnsupported &&
           std::string(error->what()) ==
               "test: expected ranks that can reach each other's memory, got rank 0, which cannot "
               "reach that of rank 1: the memory of rank 0 is private to its process; make the "
               "tensor with torch_overlap.symmetric_empty";
  };
  const Child child(body);
  auto bootstrap = child.bootstrap();
  EXPECT_TRUE(body(bootstrap));
  EXPECT_EQ(child.join(), 0);
}

// A process that exits after it has published its memory.
class LeavingBootstrap final : public Bootstrap {
 public:
  explicit LeavingBootstrap(Bootstrap& bootstrap) : Bootstrap(1, 2, {}), bootstrap_(bootstrap) {}
  std::vector<std::string> all_gather(const std::string& mine) override {
    (void)bootstrap_.all_gather(mine);
    _exit(0);
  }

 private:
  Bootstrap& bootstrap_;
};

TEST(SymmetricMemory, ARankThatLeavesHalfWayIsNamedWithinOneTimeout) {
  const auto request = request_of(symmetric_empty({4}, at::kFloat, c10::kCPU));
  const Child child([&](Bootstrap& bootstrap) {
    LeavingBootstrap leaving(bootstrap);
    SymmetricMemory::rendezvous(leaving, request);
    return false;
  });
  auto bootstrap = child.bootstrap();
  bootstrap.set_timeout(milliseconds(300));
  const auto error = thrown_error([&] { SymmetricMemory::rendezvous(bootstrap, request); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind(), ErrorKind::kTimeout);
  EXPECT_STREQ(error->what(),
               "test: expected the memory of 2 ranks for 'memory' within 300 ms, got none of ranks "
               "[1]; look at what they do");
  EXPECT_EQ(child.join(), 0);
}

TEST(Descriptors, ARankThatSendsNothingIsNamedAtTheDeadline) {
  DescriptorExchange exchange;
  const DescriptorExchange silent;
  const auto begin = std::chrono::steady_clock::now();
  const auto received =
      exchange.run(0, {exchange.name(), silent.name()}, {STDIN_FILENO}, begin + milliseconds(100));
  EXPECT_EQ(received[1].fault, "its descriptors did not arrive");
  EXPECT_TRUE(received[1].is_late);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(100));
}

TEST(Descriptors, OneThatIsGoneIsNoPartner) {
  DescriptorExchange exchange;
  const std::string gone = DescriptorExchange().name();
  const auto received = exchange.run(0, {exchange.name(), gone}, {},
                                     std::chrono::steady_clock::now() + milliseconds(50));
  EXPECT_NE(received[1].fault.find("cannot connect"), std::string::npos) << received[1].fault;
  EXPECT_TRUE(received[1].is_late);
}

TEST(ProcessIdentity, OtherHostsAndNamespacesAreNamed) {
  const ProcessIdentity& here = ProcessIdentity::current();
  ProcessIdentity other = here;
  EXPECT_EQ(here.unreachable_reason(other), "");
  other.network = "elsewhere";
  EXPECT_NE(here.unreachable_reason(other).find("different network namespaces"), std::string::npos);
  other.system = "another";
  EXPECT_NE(here.unreachable_reason(other).find("different hosts"), std::string::npos);
}

TEST(ProcessIdentity, AForkedChildIsAnotherProcess) {
  const std::string before = ProcessIdentity::current().process;
  const pid_t pid = fork();
  if (pid == 0) _exit(ProcessIdentity::current().process != before ? 0 : 1);
  int status = -1;
  waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(Bootstrap, FieldsHoldAnyBytes) {
  const std::vector<std::string> fields{"", "a:b", std::string("\0\n", 2), "12:"};
  EXPECT_EQ(unpack(pack(fields)), fields);
  EXPECT_EQ(unpack(""), std::vector<std::string>());
  for (const char* broken : {"5:abc", "x", "-1:"}) {
    EXPECT_TRUE(thrown_error([&] { unpack(broken); })) << broken;
  }
}

}  // namespace
}  // namespace torch_overlap
