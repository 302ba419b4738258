// Sends and receives over communicators of two ranks, on the backend `local`.
#include "torch_overlap/comm/c10d/pair_comms.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/c10d/work_wrapper.h"

namespace torch_overlap {
namespace {

using std::chrono::milliseconds;
using C10dWork = PairComms::C10dWork;

struct Rank {
  int rank;
  PairComms& pairs;

  C10dWork send(const at::Tensor& tensor, int dst, int tag = 0) const {
    return pairs.issue({rank, dst, tag}, c10::kCPU, {.rank = rank}, [tensor](TorchComm& comm) {
      return wrap(comm.send(tensor, 1, /*async_op=*/true));
    });
  }
  C10dWork recv(const at::Tensor& tensor, int src, int tag = 0) const {
    return pairs.issue({src, rank, tag}, c10::kCPU, {.rank = rank}, [tensor](TorchComm& comm) {
      return wrap(comm.recv(tensor, 0, /*async_op=*/true));
    });
  }
  static C10dWork wrap(WorkPtr work) {
    WorkParts parts;
    parts.works = {std::move(work)};
    return c10::make_intrusive<WorkWrapper>(std::move(parts));
  }
};

void run_pairs(int size, milliseconds timeout, const std::function<void(const Rank&)>& body) {
  static std::atomic<int> runs{0};
  const std::string run = "pairs" + std::to_string(runs++);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto make = [=](const PairKey& key, c10::Device device) {
        const std::string name = run + "." + std::to_string(key.src) + "-" +
                                 std::to_string(key.dst) + "." + std::to_string(key.tag);
        CommOptions options;
        options.timeout = timeout;
        options.abort_process_on_timeout_or_error = false;
        options.store = c10::make_intrusive<c10d::PrefixStore>(name, store);
        return TorchComm::create("local", device, name, options,
                                 RankAndSize{rank == key.src ? 0 : 1, 2});
      };
      PairComms pairs(make);
      body({rank, pairs});
      for (const auto& comm : pairs.comms()) comm->finalize();
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(PairComms, ARingOfSendsBeforeAnyReceiveEnds) {
  constexpr int kSize = 4;
  run_pairs(kSize, milliseconds(60'000), [](const Rank& me) {
    const int right = (me.rank + 1) % kSize;
    const int left = (me.rank + kSize - 1) % kSize;
    for (int round = 0; round < 3; ++round) {
      const at::Tensor x = at::full({1000}, 1.0 * me.rank + 10 * round);
      const at::Tensor y = at::empty({1000});
      const auto sent = me.send(x, right);
      const auto received = me.recv(y, left);
      const auto future = received->getFuture();  // before the communicators exist
      sent->wait();
      received->wait();
      EXPECT_TRUE(at::equal(y, at::full({1000}, 1.0 * left + 10 * round)));
      future->wait();
      EXPECT_TRUE(received->isCompleted());
      EXPECT_TRUE(received->isSuccess());
    }
  });
}

TEST(PairComms, MessagesMatchByTagAndInOrder) {
  run_pairs(2, milliseconds(60'000), [](const Rank& me) {
    constexpr int kMessages = 5;
    std::vector<at::Tensor> tensors;
    std::vector<C10dWork> works;
    for (int i = 0; i < kMessages; ++i) {
      for (const int tag : me.rank == 0 ? std::vector<int>{0, 1, 2} : std::vector<int>{2, 0, 1}) {
        tensors.push_back(at::full({8}, me.rank == 0 ? 10.0 * tag + i : -1.0));
        works.push_back(me.rank == 0 ? me.send(tensors.back(), 1, tag)
                                     : me.recv(tensors.back(), 0, tag));
      }
    }
    for (const auto& work : works) work->wait();
    if (me.rank == 0) return;
    for (int i = 0; i < kMessages; ++i) {
      const int tags[] = {2, 0, 1};
      for (int t = 0; t < 3; ++t) {
        EXPECT_TRUE(at::equal(tensors[3 * i + t], at::full({8}, 10.0 * tags[t] + i)));
      }
    }
  });
}

TEST(PairComms, APeerThatStaysAwayEndsTheWaitWithTheTimeout) {
  run_pairs(2, milliseconds(500), [](const Rank& me) {
    if (me.rank != 0) return;
    const auto work = me.send(at::ones({4}), 1);
    EXPECT_FALSE(work->isCompleted());
    EXPECT_THROW(work->wait(milliseconds(50)), Error);  // the operation continues
    EXPECT_THROW(work->wait(), Error);
    EXPECT_TRUE(work->isCompleted());
    EXPECT_FALSE(work->isSuccess());
    EXPECT_TRUE(work->exception());
    EXPECT_THROW(me.send(at::ones({4}), 1), Error);
  });
}

TEST(PairComms, ClosingFailsWhatIsQueued) {
  run_pairs(2, milliseconds(2'000), [](const Rank& me) {
    if (me.rank != 0) return;
    const auto work = me.send(at::ones({4}), 1);
    me.pairs.close("closed here");
    try {
      work->wait();
      FAIL() << "expected an error";
    } catch (const Error& error) {
      EXPECT_STREQ(error.what(), "closed here");
    }
    EXPECT_THROW(me.recv(at::ones({4}), 1), Error);
  });
}

TEST(PairComms, TooManyAreRefused) {
  run_pairs(1, milliseconds(100), [](const Rank& me) {
    for (int tag = 0; tag <= 64; ++tag) me.send(at::ones({1}), 1, tag);
    EXPECT_THROW(me.send(at::ones({1}), 1, 65), Error);
  });
}

}  // namespace
}  // namespace torch_overlap
