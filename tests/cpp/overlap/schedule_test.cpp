#include "torch_overlap/overlap/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/overlap/fused.h"

namespace torch_overlap {
namespace {

constexpr int kSizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 12};
constexpr GatherOrder kOrders[] = {GatherOrder::all_pairs, GatherOrder::ring,
                                   GatherOrder::chunk_pairs};

bool has_order(GatherOrder order, int size) {
  return order != GatherOrder::chunk_pairs || size % 2 == 0;
}

template <typename Check>
void for_every_gather(Check check) {
  for (const GatherOrder order : kOrders) {
    for (const int size : kSizes) {
      if (!has_order(order, size)) continue;
      for (int rank = 0; rank < size; ++rank) {
        SCOPED_TRACE(::testing::Message()
                     << "order " << static_cast<int>(order) << ", rank " << rank << " of " << size);
        check(order, size, rank, gather_schedule(rank, size, order));
      }
    }
  }
}

TEST(OverlapGatherSchedule, GetsEveryChunkOnceAndComputesEveryChunkOnce) {
  for_every_gather([](GatherOrder, int size, int rank, const GatherSchedule& schedule) {
    std::vector<int> got{rank};
    for (const Exchange& exchange : schedule.exchanges) got.push_back(exchange.recv);
    std::sort(got.begin(), got.end());
    std::vector<int> computed;
    for (const ChunkStep& step : schedule.steps) {
      for (int i = 0; i < step.count; ++i) computed.push_back(step.first + i);
    }
    std::sort(computed.begin(), computed.end());
    std::vector<int> all(size);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(got, all);
    EXPECT_EQ(computed, all);
  });
}

// The destination of a rank's chunk receives that chunk in the same exchange: no exchange waits for
// another one, so none can deadlock.
TEST(OverlapGatherSchedule, EveryExchangeIsAPermutation) {
  for_every_gather([](GatherOrder order, int size, int rank, const GatherSchedule& schedule) {
    for (size_t i = 0; i < schedule.exchanges.size(); ++i) {
      const Exchange& mine = schedule.exchanges[i];
      const Exchange to = gather_schedule(mine.dst, size, order).exchanges.at(i);
      EXPECT_EQ(to.src, rank);
      EXPECT_EQ(to.recv, mine.send);
      const Exchange from = gather_schedule(mine.src, size, order).exchanges.at(i);
      EXPECT_EQ(from.dst, rank);
      EXPECT_EQ(from.send, mine.recv);
      EXPECT_NE(mine.dst, rank);
      EXPECT_NE(mine.src, rank);
    }
  });
}

TEST(OverlapGatherSchedule, GivesOnlyWhatIsThere) {
  for_every_gather([](GatherOrder order, int, int rank, const GatherSchedule& schedule) {
    std::set<int> there{rank};
    for (const Exchange& exchange : schedule.exchanges) {
      EXPECT_TRUE(there.contains(exchange.send));
      if (order != GatherOrder::ring) {
        EXPECT_EQ(exchange.send, rank);
      }
      there.insert(exchange.recv);
    }
  });
}

TEST(OverlapGatherSchedule, NobodyIsGivenAChunkTwice) {
  for_every_gather([](GatherOrder, int, int, const GatherSchedule& schedule) {
    std::set<std::pair<int, int>> given;
    for (const Exchange& exchange : schedule.exchanges) {
      EXPECT_TRUE(given.insert({exchange.dst, exchange.send}).second);
    }
  });
}

TEST(OverlapGatherSchedule, BeginsWithTheOwnChunk) {
  for_every_gather([](GatherOrder order, int, int rank, const GatherSchedule& schedule) {
    const ChunkStep expected = order == GatherOrder::chunk_pairs
                                   ? ChunkStep{.first = rank - rank % 2, .count = 2}
                                   : ChunkStep{.first = rank};
    EXPECT_EQ(schedule.steps.front(), expected);
  });
}

// Products are in the order in which their inputs arrive.
TEST(OverlapGatherSchedule, ProductsDoNotOvertakeArrivals) {
  for_every_gather([](GatherOrder, int, int rank, const GatherSchedule& schedule) {
    std::vector<int> arrived{rank};
    for (const Exchange& exchange : schedule.exchanges) arrived.push_back(exchange.recv);
    std::ptrdiff_t last = -1;
    for (const ChunkStep& step : schedule.steps) {
      std::ptrdiff_t needs = -1;
      for (int chunk = step.first; chunk < step.first + step.count; ++chunk) {
        const auto at = std::find(arrived.begin(), arrived.end(), chunk);
        needs = std::max(needs, at - arrived.begin());
      }
      EXPECT_GT(needs, last);
      last = needs;
    }
  });
}

TEST(OverlapGatherSchedule, TheRingKnowsItsNeighboursOnly) {
  for (const int size : kSizes) {
    for (int rank = 0; rank < size; ++rank) {
      for (const Exchange& exchange : gather_schedule(rank, size, GatherOrder::ring).exchanges) {
        EXPECT_EQ(exchange.dst, (rank + 1) % size);
        EXPECT_EQ(exchange.src, (rank + size - 1) % size);
      }
    }
  }
}

TEST(OverlapGatherSchedule, ThePicturesOfRankOneOfFour) {
  const auto all_pairs = gather_schedule(1, 4, GatherOrder::all_pairs);
  EXPECT_EQ(all_pairs.exchanges,
            (std::vector<Exchange>{{.dst = 2, .send = 1, .src = 0, .recv = 0},
                                   {.dst = 3, .send = 1, .src = 3, .recv = 3},
                                   {.dst = 0, .send = 1, .src = 2, .recv = 2}}));
  EXPECT_EQ(all_pairs.steps, (std::vector<ChunkStep>{{1}, {0}, {3}, {2}}));
  const auto ring = gather_schedule(1, 4, GatherOrder::ring);
  EXPECT_EQ(ring.exchanges, (std::vector<Exchange>{{.dst = 2, .send = 1, .src = 0, .recv = 0},
                                                   {.dst = 2, .send = 0, .src = 0, .recv = 3},
                                                   {.dst = 2, .send = 3, .src = 0, .recv = 2}}));
  EXPECT_EQ(ring.steps, all_pairs.steps);
  const auto pairs = gather_schedule(1, 4, GatherOrder::chunk_pairs);
  EXPECT_EQ(pairs.steps, (std::vector<ChunkStep>{{0, 2}, {2, 2}}));
}

TEST(OverlapGatherSchedule, PairsNeedAnEvenSize) {
  EXPECT_THROW((void)gather_schedule(0, 3, GatherOrder::chunk_pairs), Error);
}

TEST(OverlapReduceScatterSchedule, MakesEveryChunkOnceTheOwnOneLast) {
  for (const int size : kSizes) {
    for (int rank = 0; rank < size; ++rank) {
      const auto schedule = reduce_scatter_schedule(rank, size);
      ASSERT_EQ(schedule.steps.size(), static_cast<size_t>(size));
      ASSERT_EQ(schedule.exchanges.size() + 1, schedule.steps.size());
      std::set<int> made;
      for (const ChunkStep& step : schedule.steps) {
        EXPECT_EQ(step.count, 1);
        made.insert(step.first);
      }
      EXPECT_EQ(made.size(), schedule.steps.size());
      EXPECT_EQ(schedule.steps.back().first, rank);
    }
  }
}

TEST(OverlapReduceScatterSchedule, EveryOtherRankGetsItsPartAndGivesItsOwn) {
  for (const int size : kSizes) {
    for (int rank = 0; rank < size; ++rank) {
      const auto schedule = reduce_scatter_schedule(rank, size);
      std::set<int> from;
      for (size_t i = 0; i < schedule.exchanges.size(); ++i) {
        const Exchange& mine = schedule.exchanges[i];
        EXPECT_EQ(mine.send, schedule.steps[i].first);  // the chunk that was computed just before
        EXPECT_EQ(mine.send, mine.dst);
        EXPECT_EQ(mine.recv, rank);
        const Exchange partner = reduce_scatter_schedule(mine.dst, size).exchanges.at(i);
        EXPECT_EQ(partner.src, rank);
        EXPECT_EQ(partner.recv, mine.send);
        EXPECT_NE(mine.src, rank);
        from.insert(mine.src);
      }
      EXPECT_EQ(from.size(), static_cast<size_t>(size - 1));
    }
  }
}

TEST(RowPartition, CoversAllRowsInOrderAndRoundsUp) {
  for (const int64_t rows : {0, 1, 2, 3, 5, 7, 8, 13, 1000}) {
    for (const int size : kSizes) {
      const RowPartition share{rows, size};
      int64_t next = 0;
      for (int rank = 0; rank < size; ++rank) {
        EXPECT_EQ(share.begin(rank), next);
        EXPECT_GE(share.length(rank), 0);
        EXPECT_LE(share.length(rank), share.largest());
        if (rank > 0) {
          EXPECT_LE(share.length(rank), share.length(rank - 1));
        }
        next += share.length(rank);
      }
      EXPECT_EQ(next, rows);
      EXPECT_LT(share.largest() * size - rows, size);
    }
  }
  const RowPartition eights{40, 4, 8};  // 16, 16, 8, 0
  EXPECT_EQ(eights.largest(), 16);
  EXPECT_EQ(eights.begin(2), 32);
  EXPECT_EQ(eights.length(2), 8);
  EXPECT_EQ(eights.length(3), 0);
  const RowPartition fewer{5, 4};  // 2, 2, 1, 0
  EXPECT_EQ(fewer.length(2), 1);
  EXPECT_EQ(fewer.length(3), 0);
}

TEST(Pieces, CoverInOrderNoneEmptyAllButTheLastOfOneLength) {
  for (const int64_t total : {0, 1, 7, 8, 16, 50, 1000}) {
    for (const int64_t count : {0, 1, 2, 3, 4, 64}) {
      for (const int64_t multiple : {1, 2, 8, 16}) {
        const auto found = pieces(total, count, multiple);
        EXPECT_LE(found.size(), static_cast<size_t>(std::max<int64_t>(count, 1)));
        int64_t next = 0;
        for (const IndexRange& piece : found) {
          EXPECT_EQ(piece.begin, next);
          EXPECT_GT(piece.length, 0);
          EXPECT_EQ(piece.begin % multiple, 0);
          EXPECT_LE(piece.length, found.front().length);
          if (piece != found.back()) {
            EXPECT_EQ(piece.length, found.front().length);
          }
          next += piece.length;
        }
        EXPECT_EQ(next, total);
      }
    }
  }
}

TEST(PipelineOrder, EveryPieceIsMadeBeforeItIsReducedAndAllAreReducedInOrder) {
  for (const int count : {0, 1, 2, 3, 8}) {
    for (const bool first : {false, true}) {
      const auto order = pipeline_order(count, first);
      ASSERT_EQ(order.size(), static_cast<size_t>(2 * count));
      int made = 0;
      int reduced = 0;
      for (const PipelineStep& step : order) {
        EXPECT_EQ(step.piece, step.is_product ? made : reduced);
        ++(step.is_product ? made : reduced);
        EXPECT_LE(reduced, made);
      }
      EXPECT_EQ(made, count);
      EXPECT_EQ(reduced, count);
    }
  }
}

TEST(PipelineOrder, ThePictures) {
  const auto text = [](const std::vector<PipelineStep>& order) {
    std::string all;
    for (const auto& [is_product, piece] : order) {
      all += (is_product ? "G" : "R") + std::to_string(piece) + " ";
    }
    return all;
  };
  EXPECT_EQ(text(pipeline_order(3, false)), "G0 R0 G1 R1 G2 R2 ");
  EXPECT_EQ(text(pipeline_order(3, true)), "G0 G1 R0 G2 R1 R2 ");
}

TEST(LowLatencySums, HaveRoomThatNoProductIsPutIn) {
  for (const int size : kSizes) {
    for (const int64_t rows : {0, 1, 3, 16, 100, 8192}) {
      for (const int64_t row_bytes : {2, 14, 16, 4096, 57344}) {
        const RowPartition share{rows, size};
        const int64_t least = low_latency_sum_bytes(share, row_bytes);
        for (const int64_t room : {least, least + 1, least + (2 << 20), 3 * least}) {
          const int64_t sums_at = low_latency_sums_offset(room, size);
          EXPECT_EQ(sums_at % kSumAlignment, 0);
          EXPECT_LE(rows * row_bytes, sums_at);
          EXPECT_LE(sums_at + share.largest() * row_bytes, room);
          // Slices of whole vectors instead of rows.
          const int64_t slice = (rows * row_bytes / 16 + size - 1) / size * 16;
          if (row_bytes % 16 == 0) {
            EXPECT_LE(sums_at + slice, room);
          }
        }
      }
    }
  }
}

TEST(LowLatencySums, GoInOneShotWhereThatReadsLittleMore) {
  EXPECT_TRUE(uses_one_shot(int64_t{1} << 40, 2));
  for (const auto& [size, most] : {std::pair(3, 512 << 10), std::pair(4, 512 << 10),
                                   std::pair(5, 256 << 10), std::pair(8, 256 << 10)}) {
    EXPECT_TRUE(uses_one_shot(most, size));
    EXPECT_FALSE(uses_one_shot(most + 1, size));
  }
}

// --- Pieces of the rows of a fused reduce-scatter -----------------------------------------------

TEST(FusedReduceScatter, PiecesAreWholeTilesAndCoverTheRowsOfEveryRank) {
  for (int size = 2; size <= 8; ++size) {
    for (const int64_t rows : {0, 1, 5, 127, 129, 257, 1000, 4097, 8192, 8401}) {
      for (int count = 1; count <= 4; ++count) {
        const FusedReduceScatter scatter{
            .gemm = {}, .rows = {rows, size}, .out = {}, .pieces = count};
        SCOPED_TRACE(::testing::Message() << rows << " rows, " << size << " ranks, " << count);
        EXPECT_TRUE(scatter.piece_rows() % 128 == 0 ||
                    scatter.piece_rows() == scatter.rows.largest());
        EXPECT_GE(scatter.piece_rows() * count, scatter.rows.largest());
        for (int rank = 0; rank < size; ++rank) {
          int64_t end = 0;
          const auto pieces = scatter.pieces_of(rank);
          EXPECT_LE(static_cast<int>(pieces.size()), count);
          for (const IndexRange& piece : pieces) {
            EXPECT_EQ(piece.begin, end);
            EXPECT_EQ(piece.begin % scatter.piece_rows(), 0);
            EXPECT_GT(piece.length, 0);
            EXPECT_LE(piece.length, scatter.piece_rows());
            end += piece.length;
          }
          EXPECT_EQ(end, scatter.rows.length(rank));
        }
      }
    }
  }
}

TEST(FusedReduceScatter, AShortRankMayHaveAPieceLess) {
  const FusedReduceScatter scatter{.gemm = {}, .rows = {257, 2}, .out = {}, .pieces = 2};
  EXPECT_EQ(scatter.pieces_of(0), (std::vector<IndexRange>{{0, 128}, {128, 1}}));
  EXPECT_EQ(scatter.pieces_of(1), (std::vector<IndexRange>{{0, 128}}));
}

}  // namespace
}  // namespace torch_overlap
