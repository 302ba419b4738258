#include "torch_overlap/ops/chunking.h"

#include <gtest/gtest.h>

#include <set>

namespace torch_overlap::ops {
namespace {

constexpr int kSizes[] = {1, 2, 3, 4, 5, 8};

TEST(GatherSchedule, ReadsEveryChunkOnceTheOwnOneFirst) {
  for (const int size : kSizes) {
    for (int rank = 0; rank < size; ++rank) {
      const auto steps = gather_schedule(rank, size);
      ASSERT_EQ(steps.size(), static_cast<size_t>(size));
      EXPECT_EQ(steps[0].chunk, rank);
      std::set<int> chunks;
      std::set<int> targets;
      for (const auto& step : steps) {
        chunks.insert(step.chunk);
        targets.insert(step.to);
      }
      EXPECT_EQ(chunks.size(), steps.size());
      EXPECT_EQ(targets.size(), steps.size());
    }
  }
}

// Every step is a permutation: who sends to me in a step is who I receive from. So no step waits
// for another one, and none can deadlock.
TEST(GatherSchedule, EverySendMeetsItsReceiveInTheSameStep) {
  for (const int size : kSizes) {
    for (int rank = 0; rank < size; ++rank) {
      const auto steps = gather_schedule(rank, size);
      for (size_t i = 1; i < steps.size(); ++i) {
        EXPECT_EQ(gather_schedule(steps[i].chunk, size)[i].to, rank);
        EXPECT_EQ(gather_schedule(steps[i].to, size)[i].chunk, rank);
      }
    }
  }
}

TEST(ScatterSchedule, WritesEveryChunkOnceTheOwnOneLast) {
  for (const int size : kSizes) {
    for (int rank = 0; rank < size; ++rank) {
      const auto steps = scatter_schedule(rank, size);
      ASSERT_EQ(steps.size(), static_cast<size_t>(size));
      EXPECT_EQ(steps.back().chunk, rank);
      std::set<int> chunks;
      std::set<int> sources;
      for (const auto& step : steps) {
        chunks.insert(step.chunk);
        sources.insert(step.from);
      }
      EXPECT_EQ(chunks.size(), steps.size());
      EXPECT_EQ(sources.size(), steps.size());
    }
  }
}

TEST(ScatterSchedule, EverySendMeetsItsReceiveInTheSameStep) {
  for (const int size : kSizes) {
    for (int rank = 0; rank < size; ++rank) {
      const auto steps = scatter_schedule(rank, size);
      for (size_t i = 0; i + 1 < steps.size(); ++i) {
        EXPECT_EQ(scatter_schedule(steps[i].chunk, size)[i].from, rank);
        EXPECT_EQ(scatter_schedule(steps[i].from, size)[i].chunk, rank);
      }
    }
  }
}

TEST(RowChunks, CoverAllRowsInOrderNoneEmpty) {
  for (const int64_t rows : {1, 2, 3, 4, 5, 7, 1000}) {
    for (const int64_t count : {1, 2, 4, 7}) {
      int64_t next = 0;
      for (const auto& chunk : row_chunks(rows, count)) {
        EXPECT_EQ(chunk.begin, next);
        EXPECT_GT(chunk.length, 0);
        EXPECT_LE(chunk.length, rows / count + 1);
        next += chunk.length;
      }
      EXPECT_EQ(next, rows);
    }
  }
}

TEST(RowChunks, NoRowsAreOneEmptyChunk) {
  const auto chunks = row_chunks(0, 4);
  ASSERT_EQ(chunks.size(), 1U);
  EXPECT_EQ(chunks[0].length, 0);
}

}  // namespace
}  // namespace torch_overlap::ops
