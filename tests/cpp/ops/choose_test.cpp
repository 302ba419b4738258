#include "torch_overlap/ops/choose.h"

#include <gtest/gtest.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/backends/local/spawn.h"
#include "torch_overlap/ops/tuning.h"

namespace torch_overlap::ops {
namespace {

std::shared_ptr<TorchComm> fake_comm(const std::string& name, int size) {
  return TorchComm::create("fake", c10::kCPU, name, {}, RankAndSize{0, size});
}

OverlapProblem problem_of(at::ScalarType dtype, int64_t rows) {
  return {
      .op = "op", .dtype = dtype, .chunk_rows = rows, .gather_bytes = 1, .reduce_scatter_bytes = 1};
}

Algorithm chosen(std::string_view algorithm, const std::shared_ptr<TorchComm>& comm, int64_t rows) {
  return choose_algorithm(problem_of(at::kFloat, rows), algorithm, comm).value();
}

Choice explained(const OverlapProblem& problem, const std::shared_ptr<TorchComm>& comm) {
  const ExplainScope scope;
  EXPECT_EQ(choose_algorithm(problem, "auto", comm), std::nullopt);
  return scope.choice.value();
}

// Sets the tuning for all ranks, which are threads of one process.
void tune(const std::shared_ptr<TorchComm>& comm, TuningSource source,
          const TuningEntries& entries) {
  comm->barrier(/*async_op=*/false);
  if (comm->rank() == 0) set_tuning(source, entries);
  comm->barrier(/*async_op=*/false);
}

template <typename F>
Error choose_error(const F& choose) {
  try {
    choose();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorKind::kRuntime, "");
}

TEST(ChooseAlgorithm, TakesWhatIsAsked) {
  const auto comm = fake_comm("asked", 8);
  EXPECT_EQ(chosen("sequential", comm, 1 << 20), Algorithm::sequential);
  EXPECT_EQ(chosen("pipelined", comm, 1), Algorithm::pipelined);
  comm->finalize();
}

TEST(ChooseAlgorithm, AutoGoesInChunksThatOutlastTheirTransfer) {
  const auto comm = fake_comm("auto", 8);
  EXPECT_EQ(chosen("auto", comm, 1 << 20), Algorithm::pipelined);
  EXPECT_EQ(chosen("auto", comm, 1), Algorithm::sequential);
  comm->finalize();
  const auto alone = fake_comm("alone", 1);
  EXPECT_EQ(chosen("auto", alone, 1 << 20), Algorithm::sequential);
  alone->finalize();
}

TEST(ChooseAlgorithm, SaysWhyAChannelCannotBeUsed) {
  const auto comm = fake_comm("peerless", 2);
  for (const auto* algorithm : {"p2p", "bulk"}) {
    const auto error = choose_error([&] { chosen(algorithm, comm, 1 << 20); });
    EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
    EXPECT_EQ(std::string(error.what()), concat("op: expected what algorithm '", algorithm,
                                                "' needs, got: the communicator has no peers. Use "
                                                "'auto' or 'sequential'."));
  }
  const auto error =
      choose_error([&] { choose_algorithm(problem_of(at::kLong, 1 << 20), "p2p", comm); });
  EXPECT_STREQ(
      error.what(),
      "op: expected what algorithm 'p2p' needs, got: products of torch.int64 are torch's. Use "
      "'auto' or 'sequential'.");
  comm->finalize();
}

TEST(ChooseAlgorithm, ListsTheChoices) {
  const auto comm = fake_comm("listed", 2);
  const auto error = choose_error([&] { chosen("tree", comm, 1); });
  EXPECT_EQ(error.kind(), ErrorKind::kValue);
  EXPECT_STREQ(error.what(),
               "op: expected algorithm to be one of auto, sequential, pipelined, p2p, bulk, fused, "
               "low_latency, "
               "got 'tree'. Use one of them.");
  comm->finalize();
}

TEST(ChooseAlgorithm, WhatIsKeptEndsWithTheTable) {
  const OverlapProblem problem{
      .op = "op", .dtype = at::kFloat, .global_shape = GemmShape{64, 64, 64}, .chunk_rows = 1};
  const auto key = tuning_key("op", 64, 64, 64, at::kFloat, 2, "cpu", /*in_graph=*/false);
  run_local_ranks(2, [&](const std::shared_ptr<TorchComm>& comm) {
    for (int turn = 0; turn < 2; ++turn) {
      for (int call = 0; call < 2; ++call) {
        EXPECT_EQ(choose_algorithm(problem, "auto", comm), Algorithm::sequential);
      }
      tune(comm, TuningSource::table, {{key, "pipelined"}});
      EXPECT_EQ(choose_algorithm(problem, "auto", comm), Algorithm::pipelined);
      EXPECT_EQ(choose_algorithm(problem, "sequential", comm), Algorithm::sequential);
      OverlapProblem other = problem;
      other.global_shape->m *= 8;
      EXPECT_EQ(choose_algorithm(other, "auto", comm), Algorithm::sequential);
      tune(comm, TuningSource::table, {});
    }
  });
}

// Sizes are rounded to half a power of two: 1024, 1448, 2048, 2896, 4096, ...
TEST(ChooseAlgorithm, TakesWhatIsQuickestForLikeSizes) {
  const auto key = [](int64_t m, int64_t n, int64_t k) {
    return tuning_key("op", m, n, k, at::kFloat, 2, "cpu", /*in_graph=*/false);
  };
  const TuningEntries table{{key(1024, 1024, 1024), "sequential"},
                            {key(8192, 1024, 1024), "pipelined"}};
  const TuningEntries cache{{key(1024, 1024, 1024), "pipelined"},
                            {key(1024, 2048, 1024), "pipelined"}};
  const std::string exact = "measured as the quickest, ";
  const std::string like = "measured as the quickest for a like size, ";
  const struct {
    int64_t m, n, k;
    std::string algorithm, why, decided_by;
  } cases[] = {
      {1024, 1024, 1024, "sequential", exact, "table"},
      {1100, 1000, 1024, "sequential", exact, "table"},
      {1024, 2048, 1024, "pipelined", exact, "cache"},
      {1448, 1024, 1024, "sequential", like, "table"},
      {1024, 1448, 1024, "sequential", like, "table"},  // the cache's is equally near
      {1024, 2048, 1448, "pipelined", like, "cache"},
      {724, 724, 724, "sequential", like, "table"},
      {512, 512, 1024, "sequential", like, "table"},
      {512, 512, 724, "sequential", "", "rule"},
      {2896, 1024, 1024, "pipelined", like, "table"},  // equally near to both: the larger one
      {2048, 1024, 1024, "sequential", like, "table"},
      {8192, 1024, 4096, "pipelined", like, "table"},
      {8192, 1024, 5793, "sequential", "", "rule"},
      {65536, 1024, 1024, "sequential", "", "rule"},
  };
  run_local_ranks(2, [&](const std::shared_ptr<TorchComm>& comm) {
    tune(comm, TuningSource::cache, cache);
    tune(comm, TuningSource::table, table);
    for (const auto& [m, n, k, algorithm, why, decided_by] : cases) {
      SCOPED_TRACE(concat(m, " x ", n, " x ", k));
      const OverlapProblem problem{
          .op = "op", .dtype = at::kFloat, .global_shape = GemmShape{m, n, k}, .chunk_rows = 1};
      EXPECT_EQ(to_string(choose_algorithm(problem, "auto", comm).value()), algorithm);
      const auto choice = explained(problem, comm);
      EXPECT_EQ(to_string(choice.algorithm), algorithm);
      EXPECT_EQ(choice.decided_by, decided_by);
      if (!why.empty()) {
        EXPECT_EQ(choice.why, why + decided_by);
      }
      OverlapProblem other = problem;
      other.dtype = at::kDouble;
      EXPECT_EQ(explained(other, comm).decided_by, "rule");
      other = problem;
      other.op = "another op";
      EXPECT_EQ(explained(other, comm).decided_by, "rule");
    }
    tune(comm, TuningSource::cache, {});
    tune(comm, TuningSource::table, {});
  });
}

TEST(TuningKey, IsTheSameWithinHalfAPowerOfTwo) {
  const auto key = [](int64_t m, int64_t n, int64_t k) {
    return tuning_key("op", m, n, k, at::kBFloat16, 2, "device", false);
  };
  EXPECT_EQ(key(1024, 4096, 512), key(1100, 4000, 500));
  EXPECT_NE(key(1024, 4096, 512), key(1536, 4096, 512));
  EXPECT_NE(key(1024, 4096, 512), key(1024, 4096, 768));
  EXPECT_NE(key(1024, 4096, 512), tuning_key("op", 1024, 4096, 512, at::kHalf, 2, "device", false));
  EXPECT_NE(key(1024, 4096, 512),
            tuning_key("op", 1024, 4096, 512, at::kBFloat16, 4, "device", false));
  EXPECT_NE(key(1024, 4096, 512),
            tuning_key("op", 1024, 4096, 512, at::kBFloat16, 2, "other", false));
  EXPECT_NE(key(1024, 4096, 512),
            tuning_key("op", 1024, 4096, 512, at::kBFloat16, 2, "device", true));
}

}  // namespace
}  // namespace torch_overlap::ops
