#include "torch_overlap/collectives/select.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

using G = CollectiveGeometry;

constexpr size_t kKi = 1024;
constexpr size_t kMi = 1024 * kKi;
constexpr CollectiveKind kKinds[] = {CollectiveKind::all_reduce, CollectiveKind::all_gather,
                                     CollectiveKind::reduce_scatter, CollectiveKind::all_to_all,
                                     CollectiveKind::broadcast};

CollectiveProblem problem_of(CollectiveKind kind, int size, size_t bytes) {
  return {.kind = kind, .size = size, .bytes = bytes, .ll_data_bytes = 12};
}

Protocol protocol_of(CollectiveKind kind, int size, size_t bytes, CollectiveMode mode) {
  return plan_collective(problem_of(kind, size, bytes), mode).protocol;
}

TEST(PlanCollective, OnlyGroupsOfTwoToEight) {
  for (const CollectiveKind kind : kKinds) {
    EXPECT_FALSE(is_supported_collective(kind, 1));
    EXPECT_FALSE(is_supported_collective(kind, G::kMaxRanks + 1));
    for (int size = 2; size <= G::kMaxRanks; ++size) {
      EXPECT_TRUE(is_supported_collective(kind, size));
    }
    EXPECT_EQ(protocol_of(kind, 16, 64, CollectiveMode::always), Protocol::none);
  }
}

TEST(PlanCollective, LinesForSmallMessagesThenPushThenNccl) {
  for (const CollectiveKind kind : kKinds) {
    for (int size = 2; size <= G::kMaxRanks; ++size) {
      EXPECT_EQ(protocol_of(kind, size, 1, CollectiveMode::automatic), Protocol::ll);
      EXPECT_EQ(protocol_of(kind, size, 64 * kKi, CollectiveMode::automatic), Protocol::ll);
      EXPECT_EQ(protocol_of(kind, size, 256 * kKi + 1, CollectiveMode::automatic),
                size == 2                                        ? Protocol::ll
                : size > 4 && kind != CollectiveKind::all_reduce ? Protocol::none
                : size > 4                                       ? Protocol::two_shot
                                                                 : Protocol::simple);
      EXPECT_EQ(protocol_of(kind, size, 256 * kMi, CollectiveMode::automatic), Protocol::none);
      EXPECT_NE(protocol_of(kind, size, 256 * kMi, CollectiveMode::always), Protocol::none);
    }
  }
}

TEST(PlanCollective, MoreBlocksThanSmsOnlyOfTwoRanksThatPushInRounds) {
  const auto blocks = [](int size, size_t bytes) {
    return plan_collective(problem_of(CollectiveKind::all_gather, size, bytes),
                           CollectiveMode::simple)
        .blocks;
  };
  EXPECT_EQ(blocks(2, kMi), 128);
  EXPECT_EQ(blocks(2, kMi + 16), 256);
  EXPECT_EQ(blocks(2, 16 * kMi), 256);
  EXPECT_EQ(blocks(3, 16 * kMi), 128);
  EXPECT_EQ(blocks(8, 16 * kMi), 64);
}

TEST(PlanCollective, TwoShotsOnlyOfAllReduceOfMoreThanTwo) {
  EXPECT_EQ(protocol_of(CollectiveKind::all_reduce, 2, 64 * kMi, CollectiveMode::always),
            Protocol::simple);
  for (int size = 3; size <= G::kMaxRanks; ++size) {
    EXPECT_EQ(protocol_of(CollectiveKind::all_reduce, size, 64 * kMi, CollectiveMode::always),
              Protocol::two_shot);
    EXPECT_EQ(protocol_of(CollectiveKind::all_gather, size, 64 * kMi, CollectiveMode::always),
              Protocol::simple);
  }
}

TEST(PlanCollective, AProtocolThatIsAskedForIsTakenWhereItCan) {
  for (const CollectiveKind kind : kKinds) {
    for (const size_t bytes : {size_t{1}, 32 * kMi}) {
      EXPECT_EQ(protocol_of(kind, 4, bytes, CollectiveMode::ll), Protocol::ll);
      EXPECT_EQ(protocol_of(kind, 4, bytes, CollectiveMode::simple), Protocol::simple);
      EXPECT_EQ(protocol_of(kind, 4, bytes, CollectiveMode::two_shot),
                kind == CollectiveKind::all_reduce ? Protocol::two_shot : Protocol::none);
      EXPECT_EQ(protocol_of(kind, 4, bytes, CollectiveMode::off), Protocol::none);
    }
  }
}

TEST(PlanCollective, NothingToDoIsForNccl) {
  EXPECT_EQ(protocol_of(CollectiveKind::all_reduce, 2, 0, CollectiveMode::always), Protocol::none);
}

TEST(PlanCollective, SplitsThatOnlyPairsKnowAreDirectWhereAskedFor) {
  CollectiveProblem problem = problem_of(CollectiveKind::all_to_all, 4, 0);
  problem.is_uniform = false;
  EXPECT_FALSE(plan_collective(problem, CollectiveMode::automatic));
  const CollectivePlan plan = plan_collective(problem, CollectiveMode::always);
  // The plan does not depend on the number of bytes of this rank: other ranks see other sizes.
  problem.bytes = 123456;
  const CollectivePlan other = plan_collective(problem, CollectiveMode::always);
  EXPECT_EQ(plan.protocol, Protocol::simple);
  EXPECT_EQ(plan.blocks, other.blocks);
  EXPECT_EQ(plan.chunk, other.chunk);
}

// Every plan fits the memory of a channel, and its rounds cover the message.
TEST(PlanCollective, PlansFitTheMemory) {
  for (const CollectiveKind kind : kKinds) {
    for (int size = 2; size <= G::kMaxRanks; ++size) {
      for (size_t bytes = 1; bytes < 64 * kMi; bytes += 1 + bytes / 3) {
        for (const size_t ll_data_bytes : {8, 12}) {
          CollectiveProblem problem = problem_of(kind, size, bytes);
          problem.ll_data_bytes = ll_data_bytes;
          const CollectivePlan plan = plan_collective(problem, CollectiveMode::always);
          ASSERT_TRUE(plan) << bytes;
          ASSERT_GE(plan.blocks, 1);
          ASSERT_GE(plan.chunk, 1U);
          const bool has_lines = plan.protocol == Protocol::ll;
          const bool is_two_shot = plan.protocol == Protocol::two_shot;
          ASSERT_LE(plan.blocks, has_lines ? G::max_ll_blocks(size) : max_simple_blocks(size));
          ASSERT_LE(plan.chunk, has_lines ? G::kLLPackets : G::kVectors / (is_two_shot ? 2 : 1));
          const size_t unit = has_lines ? ll_data_bytes : G::kVectorBytes;
          const size_t part = is_two_shot ? (bytes + size - 1) / size : bytes;
          const size_t units = (part + unit - 1) / unit;
          const size_t chunks = (units + plan.chunk - 1) / plan.chunk;
          ASSERT_LE(chunks, 0xffffffffU);
          // At least half of the blocks, less one, have work in the first round.
          ASSERT_LE(static_cast<size_t>(plan.blocks), chunks + plan.blocks / 2 + 1);
        }
      }
    }
  }
}

TEST(PlanCollective, LinesOfEightBytesEndSooner) {
  auto problem = problem_of(CollectiveKind::all_reduce, 2, 4 * kMi);
  EXPECT_EQ(plan_collective(problem, CollectiveMode::automatic).protocol, Protocol::ll);
  problem.ll_data_bytes = 8;
  EXPECT_EQ(plan_collective(problem, CollectiveMode::automatic).protocol, Protocol::simple);
  problem.bytes = 2 * kMi;
  EXPECT_EQ(plan_collective(problem, CollectiveMode::automatic).protocol, Protocol::ll);
}

TEST(PlanCollective, LinesOfOneMessageAreOneRound) {
  for (const CollectiveKind kind : kKinds) {
    for (int size = 2; size <= G::kMaxRanks; ++size) {
      for (size_t bytes = 1; bytes <= 256 * kKi; bytes += 1 + bytes / 7) {
        const CollectivePlan plan =
            plan_collective(problem_of(kind, size, bytes), CollectiveMode::automatic);
        if (plan.protocol != Protocol::ll) continue;
        ASSERT_GE(static_cast<size_t>(plan.blocks) * plan.chunk * 12, bytes);
      }
    }
  }
}

TEST(PlanCollective, ModesHaveNames) {
  EXPECT_EQ(parse_collective_mode("off", "hint"), CollectiveMode::off);
  EXPECT_EQ(parse_collective_mode("Auto", "hint"), CollectiveMode::automatic);
  EXPECT_EQ(parse_collective_mode("always", "hint"), CollectiveMode::always);
  try {
    (void)parse_collective_mode("maybe", "hint custom_collectives");
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kValue);
    EXPECT_STREQ(error.what(),
                 "hint custom_collectives: expected off, auto, always, ll, ll128, "
                 "simple, two_shot, bulk or zero_copy, got 'maybe'");
  }
}

// --- LL128 ---------------------------------------------------------------------------------------

CollectivePlan ll128_plan(CollectiveKind kind, int size, size_t bytes, CollectiveMode mode) {
  auto problem = problem_of(kind, size, bytes);
  problem.has_ll128 = true;
  return plan_collective(problem, mode);
}

TEST(PlanCollective, WideLinesWantLinksThatCarryThem) {
  for (const CollectiveKind kind : kKinds) {
    for (int size = 2; size <= G::kMaxRanks; ++size) {
      for (const size_t bytes : {size_t{1}, kMi, 256 * kMi}) {
        EXPECT_FALSE(plan_collective(problem_of(kind, size, bytes), CollectiveMode::ll128));
        const CollectivePlan plan = ll128_plan(kind, size, bytes, CollectiveMode::ll128);
        EXPECT_EQ(plan.protocol, Protocol::ll128);
        EXPECT_EQ(to_string(plan), "ll128");
      }
    }
  }
}

// Every plan fits the memory of a channel, and its rounds cover the message.
TEST(PlanCollective, PlansOfWideLinesFitTheMemory) {
  for (const CollectiveKind kind : kKinds) {
    for (int size = 2; size <= G::kMaxRanks; ++size) {
      for (size_t bytes = 1; bytes < 64 * kMi; bytes += 1 + bytes / 3) {
        const CollectivePlan plan = ll128_plan(kind, size, bytes, CollectiveMode::ll128);
        ASSERT_GE(plan.blocks, 1);
        ASSERT_LE(plan.blocks, G::max_ll128_blocks(size));
        ASSERT_GE(plan.chunk, 1U);
        ASSERT_LE(plan.chunk, static_cast<uint32_t>(G::kLL128Units));
        const size_t part = plan.is_two_shot ? (bytes + size - 1) / size : bytes;
        const size_t units = (part + G::kLL128UnitData - 1) / G::kLL128UnitData;
        const size_t chunks = (units + plan.chunk - 1) / plan.chunk;
        ASSERT_LE(static_cast<size_t>(plan.blocks), chunks + plan.blocks / 2 + 1);
      }
    }
  }
}

TEST(PlanCollective, WideLinesOfManyRanksAddUpSlicesWhereThatSendsLess) {
  const auto is_two_shot = [](CollectiveKind kind, int size, size_t bytes) {
    return ll128_plan(kind, size, bytes, CollectiveMode::ll128).is_two_shot;
  };
  for (int size = 3; size <= G::kMaxRanks; ++size) {
    EXPECT_FALSE(is_two_shot(CollectiveKind::all_reduce, size, 64 * kKi));
    EXPECT_TRUE(is_two_shot(CollectiveKind::all_reduce, size, kMi));
    EXPECT_FALSE(is_two_shot(CollectiveKind::reduce_scatter, size, 64 * kMi));
  }
  EXPECT_FALSE(is_two_shot(CollectiveKind::all_reduce, 4, 384 * kKi));
  EXPECT_TRUE(is_two_shot(CollectiveKind::all_reduce, 4, 416 * kKi));
  EXPECT_FALSE(is_two_shot(CollectiveKind::all_reduce, 2, 64 * kMi));
}

TEST(PlanCollective, WideLinesOfTwoRanksHaveWhatIsMoreThanShortOnesAreQuickerFor) {
  constexpr size_t kMost = 8 * kMi;
  constexpr std::pair<CollectiveKind, size_t> kFew[] = {{CollectiveKind::all_reduce, 8 * kKi},
                                                        {CollectiveKind::all_gather, 0},
                                                        {CollectiveKind::reduce_scatter, 0},
                                                        {CollectiveKind::all_to_all, 0},
                                                        {CollectiveKind::broadcast, 4 * kKi}};
  for (const auto& [kind, few] : kFew) {
    for (const CollectiveMode mode : {CollectiveMode::automatic, CollectiveMode::always}) {
      if (few > 0) {
        EXPECT_EQ(ll128_plan(kind, 2, few, mode).protocol, Protocol::ll);
      }
      for (const size_t bytes : {few + 1, kMi + 1, kMost}) {
        EXPECT_EQ(ll128_plan(kind, 2, bytes, mode).protocol, Protocol::ll128);
      }
      EXPECT_NE(ll128_plan(kind, 2, kMost + 1, mode).protocol, Protocol::ll128);
    }
  }
}

TEST(PlanCollective, WideLinesOfFourRanksHaveWhatIsMoreThanShortOnesAreQuickerFor) {
  constexpr std::pair<CollectiveKind, size_t> kFew[] = {{CollectiveKind::all_reduce, 64 * kKi},
                                                        {CollectiveKind::all_gather, 16 * kKi},
                                                        {CollectiveKind::reduce_scatter, 4 * kKi},
                                                        {CollectiveKind::all_to_all, 4 * kKi},
                                                        {CollectiveKind::broadcast, 64 * kKi}};
  for (const auto& [kind, few] : kFew) {
    for (const CollectiveMode mode : {CollectiveMode::automatic, CollectiveMode::always}) {
      EXPECT_EQ(ll128_plan(kind, 4, few, mode).protocol, Protocol::ll);
      for (const size_t bytes : {few + 1, 256 * kKi}) {
        EXPECT_EQ(ll128_plan(kind, 4, bytes, mode).protocol, Protocol::ll128);
      }
      EXPECT_NE(ll128_plan(kind, 4, 16 * kMi + 1, mode).protocol, Protocol::ll128);
      EXPECT_EQ(ll128_plan(kind, 8, 4 * kKi, mode).protocol, Protocol::ll);
    }
  }
}

TEST(PlanCollective, ShortLinesOfEightBytesAreTakenForAsManyLines) {
  auto problem = problem_of(CollectiveKind::all_reduce, 4, 64 * kKi * 8 / 12);
  problem.has_ll128 = true;
  problem.ll_data_bytes = 8;
  EXPECT_EQ(plan_collective(problem, CollectiveMode::automatic).protocol, Protocol::ll);
  problem.bytes += 8;
  EXPECT_EQ(plan_collective(problem, CollectiveMode::automatic).protocol, Protocol::ll128);
}

TEST(PlanCollective, WideLinesLeaveLargeMessagesToBulkCopiesThatAreToTakeFewBlocks) {
  for (const CollectiveKind kind : kKinds) {
    auto problem = problem_of(kind, 2, 4 * kMi);
    problem.has_ll128 = true;
    problem.max_bulk_blocks = 8;
    EXPECT_EQ(plan_collective(problem, CollectiveMode::automatic).protocol, Protocol::ll128);
    problem.has_few_blocks = true;
    const CollectivePlan plan = plan_collective(problem, CollectiveMode::automatic);
    EXPECT_EQ(plan.protocol, Protocol::bulk);
    EXPECT_LE(plan.blocks, 8);
    problem.bytes = kMi;
    EXPECT_EQ(plan_collective(problem, CollectiveMode::automatic).protocol, Protocol::ll128);
  }
}

// A message that fits one round is not split into two, and each warp of a block has at most one
// unit per round.
TEST(PlanCollective, WideLinesHaveFewRoundsOfAUnitForEachWarp) {
  const auto rounds_of = [](int size, size_t units) {
    const auto plan = ll128_plan(CollectiveKind::all_gather, size, units * G::kLL128UnitData,
                                 CollectiveMode::ll128);
    EXPECT_LE(plan.chunk, static_cast<uint32_t>(G::kThreads / 32));
    const size_t of_round = size_t{plan.chunk} * plan.blocks;
    const size_t rounds = (units + of_round - 1) / of_round;
    EXPECT_LT(of_round * rounds - units, rounds * plan.blocks);  // all blocks have equal chunks
    return rounds;
  };
  for (const int size : {2, 4, 8}) {
    const size_t all = G::max_ll128_blocks(size);
    for (size_t units = 1; units <= all * 8; ++units) EXPECT_EQ(rounds_of(size, units), 1U);
    EXPECT_EQ(rounds_of(size, all * 8 + 1), 2U);
    EXPECT_EQ(rounds_of(size, all * 80), 10U);
  }
}

TEST(PlanCollective, WideLinesOfSplitsThatOnlyPairsKnowTakeAllThereIs) {
  CollectiveProblem problem = problem_of(CollectiveKind::all_to_all, 4, 0);
  problem.is_uniform = false;
  EXPECT_FALSE(plan_collective(problem, CollectiveMode::ll128));
  problem.has_ll128 = true;
  const CollectivePlan plan = plan_collective(problem, CollectiveMode::ll128);
  EXPECT_EQ(plan.protocol, Protocol::ll128);
  EXPECT_EQ(plan.blocks, G::max_ll128_blocks(4));
  EXPECT_EQ(plan.chunk, static_cast<uint32_t>(G::kLL128Units));
}

// --- Bulk copies ---------------------------------------------------------------------------------

CollectivePlan bulk_plan(CollectiveKind kind, int size, size_t bytes, CollectiveMode mode) {
  auto problem = problem_of(kind, size, bytes);
  problem.max_bulk_blocks = 66;
  return plan_collective(problem, mode);
}

TEST(PlanCollective, BulkCopiesWantWholeVectorsAndAGpuThatHasThem) {
  for (const CollectiveKind kind : kKinds) {
    for (int size = 2; size <= G::kMaxRanks; ++size) {
      for (const size_t bytes : {size_t{16}, kMi, 256 * kMi}) {
        const CollectivePlan plan = bulk_plan(kind, size, bytes, CollectiveMode::bulk);
        EXPECT_EQ(plan.protocol, Protocol::bulk);
        EXPECT_EQ(to_string(plan), "bulk");
        EXPECT_FALSE(bulk_plan(kind, size, bytes + 8, CollectiveMode::bulk));
        EXPECT_FALSE(plan_collective(problem_of(kind, size, bytes), CollectiveMode::bulk));
      }
    }
  }
}

TEST(PlanCollective, BulkCopiesTakeWhatIsLarge) {
  for (const CollectiveKind kind : kKinds) {
    const auto of_two = [&](size_t bytes, CollectiveMode mode = CollectiveMode::automatic) {
      return bulk_plan(kind, 2, bytes, mode).protocol;
    };
    EXPECT_EQ(of_two(4 * kMi), Protocol::ll);
    EXPECT_EQ(of_two(4 * kMi + 16), Protocol::bulk);
    EXPECT_EQ(of_two(8 * kMi + 8), Protocol::simple);
    EXPECT_EQ(of_two(1024 * kMi), Protocol::bulk);
    EXPECT_EQ(of_two(1024 * kMi + 8), Protocol::none);
    EXPECT_EQ(of_two(1024 * kMi + 8, CollectiveMode::always), Protocol::simple);
    for (int size = 3; size <= G::kMaxRanks; ++size) {
      EXPECT_NE(bulk_plan(kind, size, 8 * kMi, CollectiveMode::automatic).protocol, Protocol::bulk);
      EXPECT_EQ(bulk_plan(kind, size, 64 * kMi, CollectiveMode::always).protocol, Protocol::bulk);
    }
  }
}

TEST(PlanCollective, BulkCopiesTakeNoMoreBlocksThanTheyMay) {
  auto problem = problem_of(CollectiveKind::all_gather, 2, 64 * kMi);
  for (const int most : {1, 24, 64, 1000}) {
    problem.max_bulk_blocks = most;
    EXPECT_EQ(plan_collective(problem, CollectiveMode::automatic).blocks, std::min(most, 64));
  }
}

// Every plan fits the memory of a channel, and its rounds cover the message.
TEST(PlanCollective, PlansOfBulkCopiesFitTheMemory) {
  for (const CollectiveKind kind : kKinds) {
    for (int size = 2; size <= G::kMaxRanks; ++size) {
      for (size_t bytes = 16; bytes < 64 * kMi; bytes += 16 + bytes / 48 * 16) {
        const CollectivePlan plan = bulk_plan(kind, size, bytes, CollectiveMode::bulk);
        ASSERT_GE(plan.blocks, 1);
        ASSERT_LE(plan.blocks, G::max_bulk_blocks(size));
        ASSERT_GE(plan.chunk, 1U);
        ASSERT_LE(plan.chunk * G::kVectorBytes, G::bulk_bytes(size));
        ASSERT_EQ(plan.is_two_shot, kind == CollectiveKind::all_reduce && size > 2);
        const size_t part = plan.is_two_shot ? (bytes + size - 1) / size : bytes;
        const size_t vectors = (part + G::kVectorBytes - 1) / G::kVectorBytes;
        const size_t chunks = (vectors + plan.chunk - 1) / plan.chunk;
        ASSERT_LE(static_cast<size_t>(plan.blocks), chunks + plan.blocks / 2 + 1);
      }
    }
  }
}

// --- Tensors in windows --------------------------------------------------------------------------

CollectivePlan window_plan(CollectiveKind kind, int size, size_t bytes, CollectiveMode mode) {
  auto problem = problem_of(kind, size, bytes);
  problem.has_windows = true;
  return plan_collective(problem, mode);
}

TEST(PlanCollective, ZeroCopyWantsAWindowAndWholeVectors) {
  for (const CollectiveKind kind : kKinds) {
    for (int size = 2; size <= G::kMaxRanks; ++size) {
      for (const size_t bytes : {size_t{16}, kMi, 256 * kMi}) {
        EXPECT_FALSE(plan_collective(problem_of(kind, size, bytes), CollectiveMode::zero_copy));
        EXPECT_FALSE(window_plan(kind, size, bytes + 8, CollectiveMode::zero_copy));
        const CollectivePlan plan = window_plan(kind, size, bytes, CollectiveMode::zero_copy);
        EXPECT_TRUE(plan.zero_copy);
        EXPECT_EQ(to_string(plan), "zero_copy");
        EXPECT_EQ(plan.protocol, kind == CollectiveKind::all_reduce && size > 2 ? Protocol::two_shot
                                                                                : Protocol::simple);
      }
    }
  }
}

// The launch equals that of the fallback, which also serves ranks whose tensors are in no window.
TEST(PlanCollective, ZeroCopyHasTheBlocksOfWhatItFallsBackTo) {
  for (const CollectiveKind kind : kKinds) {
    for (int size = 2; size <= G::kMaxRanks; ++size) {
      for (size_t bytes = 16; bytes < 64 * kMi; bytes += 16 + bytes / 48 * 16) {
        const CollectivePlan with = window_plan(kind, size, bytes, CollectiveMode::zero_copy);
        const bool is_two_shot = with.protocol == Protocol::two_shot;
        const CollectivePlan without =
            plan_collective(problem_of(kind, size, bytes),
                            is_two_shot ? CollectiveMode::two_shot : CollectiveMode::simple);
        EXPECT_EQ(with.protocol, without.protocol);
        EXPECT_EQ(with.blocks, without.blocks);
        EXPECT_EQ(with.chunk, without.chunk);
      }
    }
  }
}

// Exception: large gathers of three and four ranks.
TEST(PlanCollective, WindowsChangeNothingThatIsSmallOrNotAskedFor) {
  for (const CollectiveKind kind : kKinds) {
    for (int size = 2; size <= G::kMaxRanks; ++size) {
      EXPECT_EQ(window_plan(kind, size, 64 * kKi, CollectiveMode::automatic).protocol,
                Protocol::ll);
      for (const size_t bytes : {kMi, 8 * kMi, 256 * kMi}) {
        const bool gains = kind == CollectiveKind::all_gather && size > 2 && size <= 4;
        EXPECT_EQ(window_plan(kind, size, bytes, CollectiveMode::automatic).zero_copy,
                  gains && bytes > kMi);
      }
      EXPECT_TRUE(window_plan(kind, size, 256 * kMi, CollectiveMode::always).zero_copy);
      for (const CollectiveMode mode : {CollectiveMode::ll, CollectiveMode::simple}) {
        EXPECT_FALSE(window_plan(kind, size, kMi, mode).zero_copy);
      }
      EXPECT_FALSE(window_plan(kind, size, kMi, CollectiveMode::off));
    }
  }
}

// --- With an RMSNorm of rows ---------------------------------------------------------------------

CollectivePlan norm_plan(int size, size_t rows, size_t row_bytes, CollectiveMode mode) {
  auto problem = problem_of(CollectiveKind::all_reduce, size, rows * row_bytes);
  problem.row_bytes = row_bytes;
  return plan_collective(problem, mode);
}

TEST(PlanNorm, ClustersHaveWholeRows) {
  for (int size = 2; size <= G::kMaxRanks; ++size) {
    for (const size_t rows : {1, 3, 16, 64, 500}) {
      for (const size_t row_bytes : {2, 254, 2000, 8208, 10240, 16384, 24576, 65536}) {
        for (const CollectiveMode mode : {CollectiveMode::automatic, CollectiveMode::ll,
                                          CollectiveMode::ll128, CollectiveMode::simple}) {
          const auto plan = norm_plan(size, rows, row_bytes, mode);
          if (plan.row_blocks == 0) continue;
          const bool has_lines = plan.protocol == Protocol::ll;
          const bool is_ll128 = plan.protocol == Protocol::ll128;
          const size_t unit = is_ll128 ? G::kLL128UnitData : has_lines ? 12 : G::kVectorBytes;
          const size_t room = plan.row_blocks * plan.chunk * unit;
          EXPECT_LE(plan.row_blocks, G::kMaxRowBlocks);
          EXPECT_EQ(plan.blocks % plan.row_blocks, 0);
          EXPECT_LE(plan.blocks, is_ll128    ? G::max_ll128_blocks(size)
                                 : has_lines ? G::max_ll_blocks(size)
                                             : max_simple_blocks(size));
          EXPECT_LE(plan.blocks, static_cast<int>(rows) * plan.row_blocks);
          const int most_units = is_ll128    ? G::kLL128Units
                                 : has_lines ? G::kLLPackets
                                             : G::kVectors;
          EXPECT_LE(plan.chunk, static_cast<uint32_t>(most_units));
          if (has_lines || is_ll128) {
            EXPECT_GE(room, row_bytes);
            EXPECT_LT(room - row_bytes, plan.row_blocks * unit + unit);
          } else {
            EXPECT_EQ(room, row_bytes);  // chunks are contiguous
          }
        }
      }
    }
  }
}

CollectivePlan scaled_plan(int size, size_t rows, size_t elements, CollectiveMode mode,
                           NormScaling scaling = NormScaling::block) {
  auto problem = problem_of(CollectiveKind::all_reduce, size, rows * elements * 2);
  problem.row_bytes = elements * 2;
  problem.norm_scaling = scaling;
  problem.has_ll128 = true;
  return plan_collective(problem, mode);
}

TEST(PlanNorm, ChunksOfRowsWithBlocksOfScalesHaveWholeBlocks) {
  for (int size = 2; size <= G::kMaxRanks; ++size) {
    for (const size_t elements : {64, 128, 200, 1024, 4096, 5120, 7168, 8192, 12288}) {
      for (const CollectiveMode mode : {CollectiveMode::ll, CollectiveMode::ll128}) {
        const auto plan = scaled_plan(size, 3, elements, mode);
        const size_t unit = mode == CollectiveMode::ll ? 12 : G::kLL128UnitData;
        const size_t chunk = plan.chunk * unit / 2;
        ASSERT_GT(plan.row_blocks, 0);
        EXPECT_EQ(chunk % kNormScaleBlock, 0);
        EXPECT_GE(plan.row_blocks * chunk, elements);
        EXPECT_LT((plan.row_blocks - 1) * chunk, elements);
      }
      // Only packets and lines have kernels that quantize.
      EXPECT_EQ(scaled_plan(size, 3, elements, CollectiveMode::simple).row_blocks, 0);
    }
  }
}

TEST(PlanNorm, LinesOfTwoRanksThenSimple) {
  const auto protocol = [](size_t rows, bool has_ll128) {
    auto problem = problem_of(CollectiveKind::all_reduce, 2, rows * 8192);
    problem.row_bytes = 8192;
    problem.has_ll128 = has_ll128;
    const auto plan = plan_collective(problem, CollectiveMode::automatic);
    return plan.row_blocks > 0 ? plan.protocol : Protocol::none;
  };
  EXPECT_EQ(protocol(1, true), Protocol::ll128);
  EXPECT_EQ(protocol(128, true), Protocol::ll128);
  EXPECT_EQ(protocol(129, true), Protocol::simple);
  EXPECT_EQ(protocol(256, true), Protocol::simple);
  EXPECT_EQ(protocol(257, true), Protocol::none);
  EXPECT_EQ(scaled_plan(2, 128, 4096, CollectiveMode::automatic).protocol, Protocol::ll128);
  EXPECT_EQ(scaled_plan(2, 129, 4096, CollectiveMode::automatic).row_blocks, 0);
  for (const auto scaling : {NormScaling::tensor, NormScaling::row}) {  // which Simple does not do
    const auto plan = [&](size_t rows) {
      return scaled_plan(2, rows, 4096, CollectiveMode::automatic, scaling);
    };
    EXPECT_EQ(plan(256).protocol, Protocol::ll128);
    EXPECT_EQ(plan(257).row_blocks, 0);
  }
  EXPECT_EQ(protocol(24, false), Protocol::ll);
  EXPECT_EQ(protocol(25, false), Protocol::simple);
}

TEST(PlanNorm, SmallMessagesAloneAndWhatFits) {
  EXPECT_EQ(norm_plan(4, 16, 16384, CollectiveMode::automatic).protocol, Protocol::ll);
  EXPECT_EQ(norm_plan(4, 16, 16384, CollectiveMode::automatic).row_blocks, 6);
  EXPECT_EQ(norm_plan(4, 32, 16384, CollectiveMode::automatic).protocol, Protocol::simple);
  EXPECT_EQ(norm_plan(4, 32, 16384, CollectiveMode::automatic).row_blocks, 2);
  // Only the sum: a message too large for a norm in the kernel, a row too long for a cluster, other
  // modes.
  EXPECT_EQ(norm_plan(4, 33, 16384, CollectiveMode::automatic).row_blocks, 0);
  EXPECT_EQ(norm_plan(4, 33, 16384, CollectiveMode::automatic).protocol, Protocol::two_shot);
  EXPECT_EQ(norm_plan(2, 1, 80000, CollectiveMode::ll).row_blocks, 0);
  EXPECT_EQ(norm_plan(2, 3, 16384, CollectiveMode::two_shot).row_blocks, 0);
  EXPECT_FALSE(norm_plan(2, 3, 16384, CollectiveMode::off));
  EXPECT_EQ(norm_plan(8, 32, 16384, CollectiveMode::automatic).row_blocks, 0);
  // Rows that are no whole number of vectors: LL, or only the sum.
  EXPECT_EQ(norm_plan(2, 20, 8200, CollectiveMode::automatic).protocol, Protocol::ll);
  EXPECT_EQ(norm_plan(2, 100, 8200, CollectiveMode::automatic).row_blocks, 0);
  EXPECT_EQ(norm_plan(2, 100, 8200, CollectiveMode::simple).row_blocks, 0);
}

}  // namespace
}  // namespace torch_overlap
