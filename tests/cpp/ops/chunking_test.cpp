#include "torch_overlap/ops/chunking.h"

#include <gtest/gtest.h>

namespace torch_overlap::ops {
namespace {

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

TEST(RowChunks, AreMultiplesOfTheUnit) {
  for (const int64_t units : {1, 3, 5, 9}) {
    int64_t next = 0;
    for (const auto& chunk : row_chunks(units * 8, 4, 8)) {
      EXPECT_EQ(chunk.begin, next);
      EXPECT_EQ(chunk.length % 8, 0);
      EXPECT_GT(chunk.length, 0);
      EXPECT_LE(chunk.length, (units / 4 + 1) * 8);
      next += chunk.length;
    }
    EXPECT_EQ(next, units * 8);
  }
}

TEST(RowChunks, NoRowsAreOneEmptyChunk) {
  const auto chunks = row_chunks(0, 4);
  ASSERT_EQ(chunks.size(), 1U);
  EXPECT_EQ(chunks[0].length, 0);
}

}  // namespace
}  // namespace torch_overlap::ops
