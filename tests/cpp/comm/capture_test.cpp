// Operations that a graph cannot hold raise while the current stream is captured. The CPU plays the
// device: a probe of the test reports the capture.

#include "torch_overlap/common/capture.h"
#include "comm/local_ranks.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

thread_local bool captures = false;

// The calling thread captures for the lifetime of this object.
class ThreadCapture {
 public:
  ThreadCapture() { captures = true; }
  ~ThreadCapture() { captures = false; }
  ThreadCapture(const ThreadCapture&) = delete;
  ThreadCapture& operator=(const ThreadCapture&) = delete;
};

class RefusedCapture : public ::testing::Test {
 protected:
  void SetUp() override {
    register_capture_probe(c10::kCPU, [](c10::DeviceIndex) noexcept { return captures; });
  }
  void TearDown() override { register_capture_probe(c10::kCPU, nullptr); }
};

void expect_refused(const std::string& op, const std::function<void()>& body) {
  const ThreadCapture capture;
  const Error error = error_of(body);
  EXPECT_EQ(error.kind(), ErrorKind::kState) << error.what();
  EXPECT_TRUE(contains(error.what(), op + ": expected a stream that is not capturing"))
      << error.what();
}

TEST_F(RefusedCapture, LeavesTheCommunicatorAsItWas) {
  CommOptions options = with_timeout(milliseconds(60'000));
  options.enable_reconfigure = true;
  run_local_ranks(
      2,
      [](const Comm& comm) {
        const RankAndSize me{comm->rank(), comm->size()};
        at::Tensor x = at::ones({4});
        expect_refused("new_comm",
                       [&] { (void)TorchComm::create("local", c10::kCPU, "captured", {}, me); });
        expect_refused("split", [&] { (void)comm->split({0, 1}); });
        expect_refused("finalize", [&] { comm->finalize(); });
        expect_refused("reconfigure", [&] {
          ReconfigureOptions members;
          members.init_handles = std::vector<std::string>{comm->init_handle()};
          (void)comm->reconfigure(members);
        });
        expect_refused("all_reduce", [&] { (void)comm->all_reduce(x, RedOpType::SUM, false); });
        EXPECT_FALSE(comm->is_finalized());
        comm->all_reduce(x, RedOpType::SUM, false);
        expect_equal(x, at::full({4}, 2.0));
        const Comm child = comm->split({0, 1});  // the ranks agree on which split this is
        child->all_reduce(x, RedOpType::SUM, false);
        expect_equal(x, at::full({4}, 4.0));
        child->finalize();
      },
      options);
}

}  // namespace
}  // namespace torch_overlap
