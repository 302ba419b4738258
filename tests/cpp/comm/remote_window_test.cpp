// Windows of ranks that cannot reach each other's memory, over a backend that claims that it can.

#include <atomic>

#include "comm/local_ranks.h"
#include "torch_overlap/comm/window.h"
#include "torch_overlap/common/capture.h"
#include "torch_overlap/symm/pretend_unreachable.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

std::atomic<int> opened{0};
std::atomic<int> closed{0};
std::atomic<int> rank_without{-1};
std::atomic<int> rank_that_fails{-1};
std::atomic<int> rank_that_cannot_say{-1};
thread_local bool is_captured = false;

class CountedAccess final : public RemoteAccess {
 public:
  CountedAccess() { ++opened; }
  void close(milliseconds) override { ++closed; }
};

// A local backend with another path to the memory of peers.
class RemoteBackend final : public Backend {
 public:
  RemoteBackend(std::shared_ptr<Backend> inner, int rank) : inner_(std::move(inner)), rank_(rank) {}
  std::string version() const override { return inner_->version(); }
  WorkPtr issue(Call call) override { return inner_->issue(std::move(call)); }
  std::shared_ptr<Backend> split(const SplitRequest& request) override {
    return inner_->split(request);
  }
  void finalize() override { inner_->finalize(); }
  void abort() override { inner_->abort(); }
  bool is_aborted() const override { return inner_->is_aborted(); }
  bool has_windows() const override { return true; }
  RemoteSupport remote_access_support() const override {
    if (rank_ == rank_that_cannot_say) fail(ErrorKind::kValue, "a wrong variable");
    if (rank_ == rank_without) return {.can = false, .why = "an old library"};
    return {.can = true};
  }
  std::shared_ptr<RemoteAccess> open_remote(Bootstrap& bootstrap, std::string_view op,
                                            SymmetricMemory&) override {
    Fault fault;
    if (rank_ == rank_that_fails) fault = {ErrorKind::kRuntime, "it broke"};
    throw_if_any_failed(bootstrap, op, fault);
    return std::make_shared<CountedAccess>();
  }

 private:
  const std::shared_ptr<Backend> inner_;
  const int rank_;
};

class RemoteWindow : public ::testing::Test {
 protected:
  void SetUp() override {
    opened = closed = 0;
    rank_without = rank_that_fails = rank_that_cannot_say = -1;
    register_capture_probe(c10::kCPU, [](c10::DeviceIndex) noexcept { return is_captured; });
    register_backend("local", {.make =
                                   [make = local_.make](const BackendContext& context) {
                                     return std::make_shared<RemoteBackend>(make(context),
                                                                            context.rank);
                                   },
                               .devices = local_.devices});
  }
  void TearDown() override {
    register_backend("local", local_);
    register_capture_probe(c10::kCPU, nullptr);
  }
  const BackendEntry local_ = *find_backend("local");
};

at::Tensor part() { return symmetric_empty({8}, at::kFloat, c10::kCPU); }

TEST_F(RemoteWindow, HasSeparatePartsAndGivesTheirAccessBackWithTheTensor) {
  run_local_ranks(3, [](const Comm& comm) {
    std::shared_ptr<TorchCommWindow> window;
    {
      const PretendUnreachable pretence;
      window = comm->new_window(part());
      comm->barrier(false);
    }
    const int peer = (comm->rank() + 1) % 3;
    EXPECT_EQ(window->access_type(comm->rank()), WinAccessType::WIN_ACCESS_TYPE_UNIFIED);
    EXPECT_EQ(window->access_type(peer), WinAccessType::WIN_ACCESS_TYPE_SEPARATE);
    const Error error = error_of([&] { (void)window->map_remote_tensor(peer); });
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_EQ(error.what(), concat("map_remote_tensor: expected a rank whose memory rank ",
                                   comm->rank(), " can reach, got ", peer, ": ",
                                   PretendUnreachable::kReason, "; put() writes to it"));
    window->tensor_deregister();
    comm->barrier(false);
    EXPECT_EQ(opened, 3);
    EXPECT_EQ(closed, 3);
  });
}

TEST_F(RemoteWindow, RefusesCapturesOfWhatGoesToTheOthersAlone) {
  run_local_ranks(2, [](const Comm& comm) {
    std::shared_ptr<TorchCommWindow> window;
    {
      const PretendUnreachable pretence;
      window = comm->new_window(part());
      comm->barrier(false);
    }
    const int peer = 1 - comm->rank();
    for (const bool async_op : {false, true}) {
      is_captured = true;
      const Error put = error_of([&] { window->put(at::ones({2}), peer, 0, async_op); });
      const Error signal = error_of([&] { window->signal(peer, async_op); });
      is_captured = false;
      for (const Error& error : {put, signal}) {
        EXPECT_EQ(error.kind(), ErrorKind::kState);
        EXPECT_TRUE(contains(error.what(), concat("rank ", peer, " is written to by NCCL's")))
            << error.what();
      }
    }
    window->signal(comm->rank(), false);
    window->wait_signal(comm->rank(), false);
    window->put(at::ones({2}), comm->rank(), 1, false);
    EXPECT_EQ(window->tensor().sum().item<float>(), 2);
    window->tensor_deregister();
  });
}

TEST_F(RemoteWindow, IsRefusedOnAllRanksWhereOneCannot) {
  rank_without = 1;
  run_local_ranks(3, [](const Comm& comm) {
    const PretendUnreachable pretence;
    const Error error = error_of([&] { (void)comm->new_window(part()); });
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_EQ(error.what(),
              concat("tensor_register: expected ranks that can reach each other's memory, got rank "
                     "0, which cannot reach that of rank 1: ",
                     PretendUnreachable::kReason,
                     "; and there is no other way: an old library on rank 1"));
    comm->barrier(false);
  });
  EXPECT_EQ(opened, 0);
}

TEST_F(RemoteWindow, IsRefusedOnAllRanksWhereOneFailsToOpenIt) {
  rank_that_fails = 2;
  run_local_ranks(3, [](const Comm& comm) {
    const PretendUnreachable pretence;
    const Error error = error_of([&] { (void)comm->new_window(part()); });
    EXPECT_TRUE(contains(error.what(), "it broke")) << error.what();
    comm->barrier(false);
  });
}

TEST_F(RemoteWindow, IsRefusedOnAllRanksWhereOneCannotSayWhetherItCan) {
  rank_that_cannot_say = 1;
  run_local_ranks(3, [](const Comm& comm) {
    const Error error = error_of([&] { (void)comm->new_window(part()); });
    EXPECT_EQ(error.kind(), ErrorKind::kValue);
    EXPECT_TRUE(contains(error.what(), "a wrong variable")) << error.what();
    comm->barrier(false);
  });
}

TEST_F(RemoteWindow, NeedsNoOtherWayWhereAllReachAll) {
  run_local_ranks(2, [](const Comm& comm) {
    const auto window = comm->new_window(part());
    EXPECT_EQ(window->access_type(1 - comm->rank()), WinAccessType::WIN_ACCESS_TYPE_UNIFIED);
    window->tensor_deregister();
  });
  EXPECT_EQ(opened, 0);
}

}  // namespace
}  // namespace torch_overlap
