// Every operation of TorchComm on `local` ranks: each element is compared with its expected value,
// sync and async, with 1, 2, 3, 4 and 8 ranks.

#include <numeric>

#include "comm/local_ranks.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

struct Case {
  int size;
  bool async_op;
};

class Contract : public ::testing::TestWithParam<Case> {
 protected:
  static void run(const std::function<void(TorchComm&)>& body) {
    run_local_ranks(
        GetParam().size, [&](const Comm& comm) { body(*comm); },
        with_timeout(milliseconds(60'000)));
  }
  static bool async_op() { return GetParam().async_op; }
};

INSTANTIATE_TEST_SUITE_P(Local, Contract,
                         ::testing::Values(Case{1, false}, Case{1, true}, Case{2, false},
                                           Case{2, true}, Case{3, false}, Case{3, true},
                                           Case{4, false}, Case{4, true}, Case{8, false},
                                           Case{8, true}),
                         [](const auto& info) {
                           return concat(info.param.async_op ? "Async" : "Sync", info.param.size);
                         });

at::Tensor sum_of(int size, int salt, at::IntArrayRef sizes) {
  at::Tensor sum = at::zeros(sizes, at::kDouble);
  for (int r = 0; r < size; ++r) sum += sample(r, salt, sizes, at::kDouble);
  return sum.to(at::kFloat);
}

// Returns the number of elements of a rank: it differs by rank, and rank 1 has none.
int64_t uneven(int rank) { return rank == 1 ? 0 : 2 * rank + 1; }

TEST_P(Contract, AllReduceSumsSmallAndLarge) {
  run([](TorchComm& comm) {
    for (const int64_t numel : {0, 1, 7, 40'003}) {  // the last one is split into chunks
      at::Tensor x = sample(comm.rank(), 1, {numel});
      comm.all_reduce(x, RedOpType::SUM, async_op())->wait();
      expect_equal(x, sum_of(comm.size(), 1, {numel}));
    }
  });
}

TEST_P(Contract, ReduceWritesTheRootAlone) {
  run([](TorchComm& comm) {
    for (int root = 0; root < comm.size(); ++root) {
      const at::Tensor input = sample(comm.rank(), 2, {3, 5});
      at::Tensor x = input.clone();
      comm.reduce(x, root, RedOpType::SUM, async_op())->wait();
      expect_equal(x, comm.rank() == root ? sum_of(comm.size(), 2, {3, 5}) : input);
    }
  });
}

TEST_P(Contract, BroadcastTakesTheRootsBytes) {
  run([](TorchComm& comm) {
    for (int root = 0; root < comm.size(); ++root) {
      for (const int64_t numel : {0, 5, 100'003}) {  // the last one is split into chunks
        const at::Tensor expected = sample(root, 3, {numel});
        at::Tensor x = comm.rank() == root ? expected.clone() : poisoned({numel});
        comm.broadcast(x, root, async_op())->wait();
        expect_equal(x, expected);
      }
    }
  });
}

TEST_P(Contract, AllGatherFillsEveryPart) {
  run([](TorchComm& comm) {
    const at::Tensor input = sample(comm.rank(), 4, {2, 3});
    std::vector<at::Tensor> parts;
    for (int r = 0; r < comm.size(); ++r) parts.push_back(poisoned({2, 3}));
    comm.all_gather(parts, input, async_op())->wait();
    const at::Tensor single = poisoned({comm.size() * 2, 3});
    comm.all_gather_single(single, input, async_op())->wait();
    // In place: the input is this rank's part of the output.
    const at::Tensor in_place = poisoned({comm.size() * 2, 3});
    const at::Tensor mine = in_place.narrow(0, comm.rank() * 2, 2);
    mine.copy_(input);
    comm.all_gather_single(in_place, mine, async_op())->wait();
    for (int r = 0; r < comm.size(); ++r) {
      const at::Tensor expected = sample(r, 4, {2, 3});
      expect_equal(parts[r], expected, "list");
      expect_equal(single.narrow(0, r * 2, 2), expected, "single");
      expect_equal(in_place.narrow(0, r * 2, 2), expected, "in place");
    }
  });
}

TEST_P(Contract, AllGatherVTakesUnevenParts) {
  run([](TorchComm& comm) {
    std::vector<at::Tensor> parts;
    for (int r = 0; r < comm.size(); ++r) parts.push_back(poisoned({uneven(r)}));
    comm.all_gather_v(parts, sample(comm.rank(), 5, {uneven(comm.rank())}), async_op())->wait();
    for (int r = 0; r < comm.size(); ++r) expect_equal(parts[r], sample(r, 5, {uneven(r)}));
  });
}

TEST_P(Contract, GatherFillsTheRoot) {
  run([](TorchComm& comm) {
    const int root = comm.size() - 1;
    const bool at_root = comm.rank() == root;
    const at::Tensor input = sample(comm.rank(), 6, {4});
    std::vector<at::Tensor> parts;
    for (int r = 0; at_root && r < comm.size(); ++r) parts.push_back(poisoned({4}));
    comm.gather(parts, input, root, async_op())->wait();
    const at::Tensor single = at_root ? poisoned({4 * comm.size()}) : at::Tensor();
    comm.gather_single(single, input, root, async_op())->wait();
    for (int r = 0; at_root && r < comm.size(); ++r) {
      expect_equal(parts[r], sample(r, 6, {4}));
      expect_equal(single.narrow(0, 4 * r, 4), sample(r, 6, {4}));
    }
  });
}

TEST_P(Contract, ScatterTakesTheRootsPart) {
  run([](TorchComm& comm) {
    const int root = comm.size() / 2;
    std::vector<at::Tensor> parts;
    for (int r = 0; comm.rank() == root && r < comm.size(); ++r) parts.push_back(sample(r, 7, {5}));
    const at::Tensor output = poisoned({5});
    comm.scatter(output, parts, root, async_op())->wait();
    expect_equal(output, sample(comm.rank(), 7, {5}));
  });
}

TEST_P(Contract, ReduceScatterSumsThisRanksPart) {
  run([](TorchComm& comm) {
    const int n = comm.size();
    std::vector<at::Tensor> inputs;
    for (int r = 0; r < n; ++r) inputs.push_back(sample(comm.rank(), 100 + r, {3}));
    const at::Tensor expected = sum_of(n, 100 + comm.rank(), {3});
    const at::Tensor output = poisoned({3});
    comm.reduce_scatter(output, inputs, RedOpType::SUM, async_op())->wait();
    expect_equal(output, expected, "list");
    const at::Tensor single = poisoned({3});
    comm.reduce_scatter_single(single, at::cat(inputs), RedOpType::SUM, async_op())->wait();
    expect_equal(single, expected, "single");
  });
}

TEST_P(Contract, ReduceScatterVTakesUnevenParts) {
  run([](TorchComm& comm) {
    std::vector<at::Tensor> inputs;
    for (int r = 0; r < comm.size(); ++r)
      inputs.push_back(sample(comm.rank(), 200 + r, {uneven(r)}));
    const at::Tensor output = poisoned({uneven(comm.rank())});
    comm.reduce_scatter_v(output, inputs, RedOpType::SUM, async_op())->wait();
    expect_equal(output, sum_of(comm.size(), 200 + comm.rank(), {uneven(comm.rank())}));
  });
}

TEST_P(Contract, AllToAllTransposes) {
  run([](TorchComm& comm) {
    const int n = comm.size();
    std::vector<at::Tensor> inputs, outputs;
    for (int r = 0; r < n; ++r) {
      inputs.push_back(sample(comm.rank() * 16 + r, 8, {2}));
      outputs.push_back(poisoned({2}));
    }
    comm.all_to_all(outputs, inputs, async_op())->wait();
    const at::Tensor single = poisoned({2 * n});
    comm.all_to_all_single(single, at::cat(inputs), async_op())->wait();
    at::Tensor in_place = at::cat(inputs);
    comm.all_to_all_single(in_place, in_place, async_op())->wait();
    for (int r = 0; r < n; ++r) {
      const at::Tensor expected = sample(r * 16 + comm.rank(), 8, {2});
      expect_equal(outputs[r], expected, "list");
      expect_equal(single.narrow(0, 2 * r, 2), expected, "single");
      expect_equal(in_place.narrow(0, 2 * r, 2), expected, "in place");
    }
  });
}

TEST_P(Contract, AllToAllVSingleTakesUnevenSplits) {
  run([](TorchComm& comm) {
    const int n = comm.size();
    const int me = comm.rank();
    // Rank i has (i + j) % 3 rows for rank j.
    std::vector<int64_t> in_splits, out_splits;
    std::vector<at::Tensor> inputs;
    for (int r = 0; r < n; ++r) {
      in_splits.push_back((me + r) % 3);
      out_splits.push_back((r + me) % 3);
      inputs.push_back(sample(me * 16 + r, 9, {(me + r) % 3, 2}));
    }
    const int64_t rows = std::accumulate(out_splits.begin(), out_splits.end(), int64_t{0});
    const at::Tensor output = poisoned({rows, 2});
    comm.all_to_all_v_single(output, at::cat(inputs), out_splits, in_splits, async_op())->wait();
    int64_t offset = 0;
    for (int r = 0; r < n; ++r) {
      expect_equal(output.narrow(0, offset, out_splits[r]),
                   sample(r * 16 + me, 9, {out_splits[r], 2}));
      offset += out_splits[r];
    }
  });
}

TEST_P(Contract, BarrierWaitsForTheLast) {
  std::atomic<int> arrived{0};
  run([&](TorchComm& comm) {
    if (comm.rank() == comm.size() - 1) std::this_thread::sleep_for(milliseconds(30));
    ++arrived;
    comm.barrier(async_op())->wait();
    EXPECT_EQ(arrived.load(), comm.size());
  });
}

TEST_P(Contract, SendThenReceiveOnEveryRankEndsWhenAsync) {
  run([](TorchComm& comm) {
    if (comm.size() == 1) return;
    const int next = (comm.rank() + 1) % comm.size();
    const int last = (comm.rank() + comm.size() - 1) % comm.size();
    const at::Tensor got = poisoned({6});
    // Blocking sends in a ring would wait for each other: one rank starts with its receive.
    const bool receives_first = !async_op() && comm.rank() == 0;
    const auto send = [&] { return comm.send(sample(comm.rank(), 10, {6}), next, async_op()); };
    const auto recv = [&] { return comm.recv(got, last, async_op()); };
    const WorkPtr first = receives_first ? recv() : send();
    const WorkPtr second = receives_first ? send() : recv();
    first->wait();
    second->wait();
    expect_equal(got, sample(last, 10, {6}));
  });
}

TEST_P(Contract, ABatchRunsAllAtOnceAndToItself) {
  run([](TorchComm& comm) {
    std::vector<P2POp> ops;
    std::vector<at::Tensor> got;
    for (int r = 0; r < comm.size(); ++r) {
      for (int k = 0; k < 2; ++k) {  // two per peer: they arrive in order
        ops.push_back({P2POp::Type::SEND, sample(comm.rank() * 16 + r, 20 + k, {3 + k}), r});
        got.push_back(poisoned({3 + k}));
        ops.push_back({P2POp::Type::RECV, got.back(), r});
      }
    }
    comm.batch_send_recv(ops, async_op())->wait();
    for (int r = 0; r < comm.size(); ++r) {
      for (int k = 0; k < 2; ++k) {
        expect_equal(got[r * 2 + k], sample(r * 16 + comm.rank(), 20 + k, {3 + k}));
      }
    }
  });
}

TEST_P(Contract, OperationsRunInTheOrderOfIssue) {
  run([](TorchComm& comm) {
    at::Tensor x = at::full({64}, comm.rank() + 1, at::kDouble);
    std::vector<WorkPtr> works;
    double expected = 0;
    for (int r = 0; r < comm.size(); ++r) expected += r + 1;
    for (int i = 0; i < 6; ++i) {
      // A blocking operation in between must wait for the earlier ones.
      works.push_back(comm.all_reduce(x, RedOpType::SUM, i % 3 == 2 ? false : async_op()));
      if (i > 0) expected *= comm.size();
    }
    for (const auto& work : works) work->wait();
    expect_equal(x, at::full({64}, expected, at::kDouble));
  });
}

TEST_P(Contract, AnyDtypeMoves) {
  run([](TorchComm& comm) {
    for (const auto dtype :
         {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kUInt16, at::kUInt32,
          at::kUInt64, at::kBool, at::kHalf, at::kBFloat16, at::kDouble, at::kFloat8_e4m3fn,
          at::kFloat8_e5m2, at::kComplexFloat, at::kComplexDouble}) {
      const at::Tensor expected = sample(0, 30, {9}, at::kLong).abs().to(dtype);
      const at::Tensor x = comm.rank() == 0 ? expected : at::ones({9}).to(dtype);
      comm.broadcast(x, 0, async_op())->wait();
      expect_equal(x.view(at::kByte), expected.view(at::kByte), c10::toString(dtype));
    }
  });
}

TEST_P(Contract, WorkTellsItsState) {
  run([](TorchComm& comm) {
    at::Tensor x = sample(comm.rank(), 11, {10});
    const WorkPtr work = comm.all_reduce(x, RedOpType::MAX, async_op());
    if (!async_op()) {
      EXPECT_TRUE(work->is_completed());
    }
    std::atomic<int> calls{0};
    work->on_completion([&](std::exception_ptr error) {
      EXPECT_FALSE(error);
      ++calls;
    });
    work->wait_blocking(milliseconds(60'000));
    EXPECT_TRUE(work->is_completed());
    EXPECT_EQ(work->status(), WorkStatus::COMPLETED);
    EXPECT_FALSE(work->exception());
    EXPECT_FALSE(work->stream());
    while (calls == 0) std::this_thread::yield();
    comm.finalize();
    EXPECT_EQ(calls.load(), 1);
  });
}

TEST_P(Contract, ACallbackMayIssueAndWait) {
  run([](TorchComm& comm) {
    at::Tensor x = at::ones({4});
    at::Tensor y = at::ones({4});
    std::atomic<bool> inner{false};
    std::atomic<bool> outer{false};
    const WorkPtr work = comm.all_reduce(x, RedOpType::SUM, async_op());
    work->on_completion([&](std::exception_ptr) {
      const WorkPtr next = comm.all_reduce(y, RedOpType::SUM, /*async_op=*/true);
      next->on_completion([&](std::exception_ptr) { inner = true; });
      next->wait();
      while (!inner) std::this_thread::yield();  // another callback, while this one waits
      comm.all_reduce(y, RedOpType::SUM, /*async_op=*/false);
      outer = true;
    });
    work->wait();
    while (!outer) std::this_thread::yield();
    expect_equal(y, at::full({4}, comm.size() * comm.size()));
  });
}

}  // namespace
}  // namespace torch_overlap
