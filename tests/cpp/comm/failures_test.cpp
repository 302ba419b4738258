// Failures on `local` ranks: missing ranks, faults, aborts, invalid arguments, invalid splits. Each
// one raises an error that names the rank and the cause, on every rank that it concerns, and never
// hangs.

#include <csignal>
#include <thread>

#include "comm/local_ranks.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

// Time that a busy machine may add to a timeout.
constexpr milliseconds kMargin{10'000};

TEST(Failures, AMissingRankIsNamedByTheOthersWithinTheTimeout) {
  for (const bool async_op : {false, true}) {
    const auto begin = HostClock::now();
    run_local_ranks(
        3,
        [&](const Comm& comm) {
          if (comm->rank() == 2) {  // neither calls nor ends
            while (!comm->is_aborted() && HostClock::now() - begin < milliseconds(1500)) {
              std::this_thread::sleep_for(milliseconds(5));
            }
            return;
          }
          at::Tensor x = at::ones({4});
          const Error error =
              error_of([&] { comm->all_reduce(x, RedOpType::SUM, async_op)->wait(); });
          EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
          EXPECT_TRUE(contains(error.what(), "all_reduce #")) << error.what();
          EXPECT_TRUE(contains(error.what(), "rank 2 did not arrive within the timeout of 300 ms"))
              << error.what();
          // From here on every call repeats the first error.
          const Error next = error_of([&] { comm->barrier(false); });
          EXPECT_EQ(next.kind(), ErrorKind::kState);
          EXPECT_TRUE(contains(next.what(), "rank 2 did not arrive")) << next.what();
          const Error last = error_of([&] { comm->finalize(); });
          EXPECT_TRUE(contains(last.what(), "rank 2 did not arrive")) << last.what();
        },
        with_timeout(milliseconds(300)));
    EXPECT_LT(HostClock::now() - begin, kMargin);
  }
}

TEST(Failures, AnOperationsOwnTimeoutCountsFromIssueAlsoBehindAnother) {
  run_local_ranks(
      2,
      [](const Comm& comm) {
        if (comm->rank() == 1) {
          std::this_thread::sleep_for(milliseconds(1500));
          comm->abort();
          return;
        }
        at::Tensor x = at::ones({4}), y = at::ones({4});
        const WorkPtr first = comm->all_reduce(x, RedOpType::SUM, true);
        OpOptions options;
        options.timeout = milliseconds(100);
        const WorkPtr second = comm->all_reduce(y, RedOpType::SUM, true, options);
        EXPECT_EQ(error_of([&] { second->wait(); }).kind(), ErrorKind::kTimeout);
        EXPECT_EQ(second->status(), WorkStatus::TIMEDOUT);
        EXPECT_TRUE(second->exception());
        EXPECT_EQ(error_of([&] { first->wait(); }).kind(), ErrorKind::kState);
        EXPECT_EQ(first->status(), WorkStatus::ERROR);
        comm->abort();
      },
      with_timeout(milliseconds(60'000)));
}

TEST(Failures, WaitBlockingWithATimeoutLeavesTheOperationAlone) {
  run_local_ranks(
      2,
      [](const Comm& comm) {
        at::Tensor x = at::ones({4});
        const WorkPtr work = comm->all_reduce(x, RedOpType::SUM, true);
        if (comm->rank() == 0) {
          const Error error = error_of([&] { work->wait_blocking(milliseconds(20)); });
          EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
          EXPECT_FALSE(work->is_completed());
          EXPECT_EQ(work->status(), WorkStatus::INPROGRESS);
        }
        work->wait_blocking();
        expect_equal(x, at::full({4}, 2));
      },
      with_timeout(milliseconds(60'000), {{"local::delay", "1@0:300"}}));
}

TEST(Failures, AnInjectedFaultEndsItForEveryRank) {
  run_local_ranks(
      3,
      [](const Comm& comm) {
        at::Tensor x = at::ones({4});
        comm->all_reduce(x, RedOpType::SUM, false);
        const Error error = error_of([&] { comm->all_reduce(x, RedOpType::SUM, true)->wait(); });
        EXPECT_EQ(error.kind(), ErrorKind::kRuntime);
        const char* expected =
            comm->rank() == 1 ? "injected fault: rank 1 fails at operation 1" : "rank 1 has left";
        EXPECT_TRUE(contains(error.what(), expected)) << error.what();
        EXPECT_THROW(comm->finalize(), Error);
      },
      with_timeout(milliseconds(60'000), {{"local::fail", "1@1"}}));
}

TEST(Failures, ADroppedRankTimesOutItself) {
  run_local_ranks(
      2,
      [](const Comm& comm) {
        at::Tensor x = at::ones({4});
        const Error error = error_of([&] { comm->broadcast(x, 0, false); });
        if (comm->rank() == 0) {
          EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
          EXPECT_TRUE(contains(error.what(), "rank 0 did not come to operation 0")) << error.what();
        }
        EXPECT_THROW(comm->finalize(), Error);
      },
      with_timeout(milliseconds(100), {{"local::drop", "0@*"}}));
}

TEST(Failures, HintsOfFaultsMustParse) {
  for (const char* bad : {"1", "1@", "x@1", "1@2:3:4", "1@2"}) {
    EXPECT_THROW(
        run_local_ranks(
            1, [](const Comm&) {}, with_timeout(milliseconds(1000), {{"local::delay", bad}})),
        Error)
        << bad;
  }
}

TEST(Failures, AbortFreesEveryWaiterOnThisRankAndTellsTheOthers) {
  run_local_ranks(
      3,
      [](const Comm& comm) {
        at::Tensor x = at::ones({4}), y = at::ones({4});
        if (comm->rank() == 2) {
          std::this_thread::sleep_for(milliseconds(50));
          comm->abort();
          EXPECT_TRUE(comm->is_aborted());
          EXPECT_EQ(error_of([&] { comm->barrier(false); }).kind(), ErrorKind::kState);
          comm->abort();     // no-op
          comm->finalize();  // releases the communicator
          return;
        }
        std::thread aborter;
        if (comm->rank() == 1) {
          aborter = std::thread([&] {
            std::this_thread::sleep_for(milliseconds(20));
            comm->abort();
          });
        }
        const WorkPtr queued = comm->all_reduce(y, RedOpType::SUM, true);
        EXPECT_THROW(comm->send(x, 2, false), Error);
        EXPECT_THROW(queued->wait(), Error);
        EXPECT_TRUE(queued->is_completed());
        if (aborter.joinable()) aborter.join();
        comm->abort();  // after a failure, finalize would repeat it
      },
      with_timeout(milliseconds(60'000)));
}

TEST(Failures, AbortHooksRunOnceAndFinalizeRefusesASecondCall) {
  run_local_ranks(2, [](const Comm& comm) {
    int runs = 0;
    comm->hooks().abort.add([&] { ++runs; });
    if (comm->rank() == 0) {
      comm->finalize();
      EXPECT_EQ(error_of([&] { comm->finalize(); }).kind(), ErrorKind::kState);
      EXPECT_EQ(error_of([&] { comm->barrier(true); }).kind(), ErrorKind::kState);
      EXPECT_EQ(runs, 0);
    } else {
      comm->abort();
      comm->abort();
      EXPECT_EQ(runs, 1);
    }
  });
}

TEST(Failures, FinalizeWaitsForWhatIsQueued) {
  run_local_ranks(
      2,
      [](const Comm& comm) {
        at::Tensor x = at::ones({4});
        std::vector<WorkPtr> works;
        for (int i = 0; i < 4; ++i) works.push_back(comm->all_reduce(x, RedOpType::SUM, true));
        comm->finalize();
        for (const auto& work : works) EXPECT_EQ(work->status(), WorkStatus::COMPLETED);
        expect_equal(x, at::full({4}, 16));
      },
      with_timeout(milliseconds(60'000), {{"local::delay", "1@0:50,0@2:50"}}));
}

TEST(Failures, DifferentOperationsOrSizesAreAnErrorOnBothRanks) {
  run_local_ranks(
      2,
      [](const Comm& comm) {
        at::Tensor x = at::ones({comm->rank() == 0 ? 4 : 8});
        const Error error = error_of([&] { comm->broadcast(x, 0, false); });
        EXPECT_EQ(error.kind(), ErrorKind::kValue);
        EXPECT_TRUE(contains(error.what(), "16 bytes on rank 0")) << error.what();
        EXPECT_TRUE(contains(error.what(), "32 bytes on rank 1")) << error.what();
        EXPECT_THROW(comm->finalize(), Error);
      },
      with_timeout(milliseconds(60'000)));
}

TEST(Failures, BadArgumentsThrowBeforeAnythingIsSent) {
  run_local_ranks(2, [](const Comm& comm) {
    const at::Tensor good = at::ones({4});
    const at::Tensor strided = at::ones({4, 4}).t();
    const auto kind = [](const auto& body) { return error_of(body).kind(); };
    if (comm->rank() == 0) {  // no other rank must notice
      EXPECT_EQ(kind([&] { comm->send(good, 2, true); }), ErrorKind::kValue);
      EXPECT_EQ(kind([&] { comm->send(good, 0, true); }), ErrorKind::kValue);
      EXPECT_EQ(kind([&] { comm->broadcast(strided, 0, true); }), ErrorKind::kValue);
      EXPECT_EQ(kind([&] { comm->broadcast({}, 0, true); }), ErrorKind::kType);
      EXPECT_EQ(kind([&] { comm->all_gather({good}, good, true); }), ErrorKind::kValue);
      EXPECT_EQ(kind([&] { comm->all_gather_single(at::ones({9}), good, true); }),
                ErrorKind::kValue);
      EXPECT_EQ(kind([&] { comm->all_gather_single(at::ones({8}, at::kLong), good, true); }),
                ErrorKind::kType);
      EXPECT_EQ(kind([&] { comm->all_to_all_v_single(good, good, {1, 1}, {2, 2}, true); }),
                ErrorKind::kValue);
      EXPECT_EQ(kind([&] { comm->batch_send_recv({}, true); }), ErrorKind::kValue);
      EXPECT_EQ(kind([&] { comm->batch_send_recv({{P2POp::Type::SEND, good, 7}}, true); }),
                ErrorKind::kValue);
    }
    at::Tensor x = at::ones({2});
    comm->all_reduce(x, RedOpType::SUM, false);
    expect_equal(x, at::full({2}, 2));
  });
}

TEST(Split, ListOrderGivesRankOrderAndChildrenWork) {
  run_local_ranks(
      4,
      [](const Comm& comm) {
        const std::vector<int> ranks =
            comm->rank() % 2 == 0 ? std::vector<int>{2, 0} : std::vector<int>{1, 3};
        const Comm child = comm->split(ranks);
        EXPECT_EQ(child->size(), 2);
        EXPECT_EQ(ranks[child->rank()], comm->rank());
        EXPECT_EQ(child->ranks_in_world(), ranks);
        EXPECT_EQ(child->options().timeout, milliseconds(50'000));
        at::Tensor x = at::full({3}, comm->rank());
        child->all_reduce(x, RedOpType::SUM, true)->wait();
        expect_equal(x, at::full({3}, comm->rank() % 2 == 0 ? 2.0 : 4.0));
        const Comm single = child->split({child->rank()});  // split of a split
        EXPECT_EQ(single->size(), 1);
        const Comm none = comm->split(comm->rank() == 0 ? std::vector<int>{0} : std::vector<int>{});
        EXPECT_EQ(none == nullptr, comm->rank() != 0);
        if (none) none->finalize();
        single->finalize();
        child->finalize();
      },
      with_timeout(milliseconds(50'000)));
}

TEST(Split, ARankMayBeDoneWithTheChildBeforeAnotherHasIt) {
  run_local_ranks(3, [](const Comm& comm) {
    for (int i = 0; i < 50; ++i) comm->split({2, 0, 1})->finalize();
  });
}

TEST(Split, OneBadListIsAnErrorOnEveryRank) {
  const std::vector<std::vector<int>> bad = {{0, 1, 2}, {1, 1, 2}, {1, 3, 2}, {1, -1}, {2}};
  run_local_ranks(
      3,
      [&](const Comm& comm) {
        for (const auto& list : bad) {
          const std::vector<int> good{0, 2};
          const bool mine = comm->rank() == 1;
          const Error error = error_of([&] { comm->split(mine ? list : good); });
          EXPECT_EQ(error.kind(), ErrorKind::kValue) << error.what();
        }
        comm->barrier(false);  // the parent still works
      },
      with_timeout(milliseconds(60'000)));
}

TEST(Lifetime, TensorsLiveUntilTheOperationIsDoneAndNoLonger) {
  run_local_ranks(
      2,
      [](const Comm& comm) {
        at::Tensor x = at::full({1000}, comm->rank() + 1);
        const c10::weak_intrusive_ptr<c10::TensorImpl> alive(x.getIntrusivePtr());
        const WorkPtr work = comm->all_reduce(x, RedOpType::SUM, true);
        at::Tensor kept = x;
        x.reset();
        if (comm->rank() == 1) {
          EXPECT_FALSE(alive.expired());
        }
        work->wait();
        expect_equal(kept, at::full({1000}, 3));
        kept.reset();
        const auto end = HostClock::now() + kMargin;  // the other thread may still release it
        while (!alive.expired() && HostClock::now() < end) std::this_thread::yield();
        EXPECT_TRUE(alive.expired());
      },
      with_timeout(milliseconds(60'000), {{"local::delay", "0@0:50"}}));
}

TEST(Lifetime, DroppedOutputsAndFactorsAreKept) {
  run_local_ranks(
      2,
      [](const Comm& comm) {
        std::vector<WorkPtr> works;
        for (int i = 0; i < 20; ++i) {
          works.push_back(
              comm->all_gather({at::empty({5000}), at::empty({5000})}, at::ones({5000}), true));
          works.push_back(
              comm->all_reduce(at::ones({5000}), ReduceOp::premul_sum(at::full({1}, 2.0f)), true));
        }
        for (const auto& work : works) work->wait();
      },
      with_timeout(milliseconds(60'000), {{"local::delay", "1@0:30"}}));
}

TEST(Lifetime, ADroppedCommunicatorAbortsAndFreesItsPeers) {
  run_local_ranks(
      2,
      [](const Comm& comm) {
        const Comm child = comm->split({0, 1});
        if (comm->rank() == 0) return;  // the child is destroyed without finalize
        at::Tensor x = at::ones({3});
        const Error error = error_of([&] { child->all_reduce(x, RedOpType::SUM, false); });
        EXPECT_TRUE(contains(error.what(), "rank 0 has left")) << error.what();
        child->abort();
      },
      with_timeout(milliseconds(60'000)));
}

TEST(Threads, ManyThreadsMayUseOneCommunicator) {
  run_local_ranks(
      2,
      [](const Comm& comm) {
        const int peer = 1 - comm->rank();
        std::vector<std::thread> threads;
        threads.emplace_back([&] {
          for (int i = 0; i < 50; ++i) {
            at::Tensor x = at::ones({8});
            comm->all_reduce(x, RedOpType::SUM, i % 2 == 0)->wait();
            expect_equal(x, at::full({8}, 2));
          }
        });
        threads.emplace_back([&] {
          for (int i = 0; i < 50; ++i)
            comm->send(at::full({4}, i, at::kFloat), peer, i % 3 == 0)->wait();
        });
        threads.emplace_back([&] {
          for (int i = 0; i < 50; ++i) {
            const at::Tensor got = poisoned({4});
            comm->recv(got, peer, i % 5 == 0)->wait();
            expect_equal(got, at::full({4}, i, at::kFloat));
          }
        });
        for (auto& thread : threads) thread.join();
      },
      with_timeout(milliseconds(60'000)));
}

// The process ends, so the test runs in another one (gtest's death tests fork and rerun the test).
TEST(ProcessDeathTest, ATimeoutEndsTheProcessAfterTheAbortHooks) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto hang = [](bool async_op) {
    CommOptions options = with_timeout(milliseconds(200), {{"local::drop", "1@0"}});
    options.abort_process_on_timeout_or_error = true;
    run_local_ranks(
        2,
        [&](const Comm& comm) {
          comm->hooks().abort.add([] { std::fprintf(stderr, "abort hook ran\n"); });
          at::Tensor x = at::ones({4});
          comm->all_reduce(x, RedOpType::SUM, async_op)->wait();
        },
        options);
  };
  EXPECT_EXIT(hang(true), ::testing::KilledBySignal(SIGABRT), "Aborting process due to timeout");
  EXPECT_EXIT(hang(false), ::testing::KilledBySignal(SIGABRT), "abort hook ran");
}

}  // namespace
}  // namespace torch_overlap
