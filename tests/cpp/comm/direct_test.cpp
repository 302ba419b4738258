#include "torch_overlap/comm/direct.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

using G = DirectGeometry;

constexpr size_t kKi = 1024;
constexpr size_t kMi = 1024 * kKi;
constexpr Primitive kDirect[] = {Primitive::all_reduce, Primitive::all_gather,
                                 Primitive::reduce_scatter, Primitive::all_to_all,
                                 Primitive::broadcast};

DirectProblem problem_of(Primitive primitive, int size, size_t bytes) {
  return {.primitive = primitive, .size = size, .bytes = bytes, .line_data = 12};
}

DirectProtocol protocol_of(Primitive primitive, int size, size_t bytes, DirectMode mode) {
  return plan_direct(problem_of(primitive, size, bytes), mode).protocol;
}

TEST(Direct, OnlyGroupsOfTwoToEight) {
  for (const Primitive primitive : kDirect) {
    EXPECT_FALSE(is_direct_possible(primitive, 1));
    EXPECT_FALSE(is_direct_possible(primitive, G::kMostRanks + 1));
    for (int size = 2; size <= G::kMostRanks; ++size) {
      EXPECT_TRUE(is_direct_possible(primitive, size));
    }
    EXPECT_EQ(protocol_of(primitive, 16, 64, DirectMode::always), DirectProtocol::none);
  }
  EXPECT_FALSE(is_direct_possible(Primitive::reduce, 4));
  EXPECT_FALSE(is_direct_possible(Primitive::p2p, 4));
}

TEST(Direct, LinesForSmallMessagesThenPushThenNccl) {
  for (const Primitive primitive : kDirect) {
    for (int size = 2; size <= G::kMostRanks; ++size) {
      EXPECT_EQ(protocol_of(primitive, size, 1, DirectMode::automatic), DirectProtocol::ll);
      EXPECT_EQ(protocol_of(primitive, size, 64 * kKi, DirectMode::automatic), DirectProtocol::ll);
      EXPECT_EQ(protocol_of(primitive, size, 256 * kKi + 1, DirectMode::automatic),
                size == 2                                        ? DirectProtocol::ll
                : size > 4 && primitive != Primitive::all_reduce ? DirectProtocol::none
                : size > 4                                       ? DirectProtocol::two_shot
                                                                 : DirectProtocol::push);
      EXPECT_EQ(protocol_of(primitive, size, 256 * kMi, DirectMode::automatic),
                DirectProtocol::none);
      EXPECT_NE(protocol_of(primitive, size, 256 * kMi, DirectMode::always), DirectProtocol::none);
    }
  }
}

TEST(Direct, MoreBlocksThanSmsOnlyOfTwoRanksThatPushInRounds) {
  const auto blocks = [](int size, size_t bytes) {
    return plan_direct(problem_of(Primitive::all_gather, size, bytes), DirectMode::push).blocks;
  };
  EXPECT_EQ(blocks(2, kMi), 128);
  EXPECT_EQ(blocks(2, kMi + 16), 256);
  EXPECT_EQ(blocks(2, 16 * kMi), 256);
  EXPECT_EQ(blocks(3, 16 * kMi), 128);
  EXPECT_EQ(blocks(8, 16 * kMi), 64);
}

TEST(Direct, TwoShotsOnlyOfAllReduceOfMoreThanTwo) {
  EXPECT_EQ(protocol_of(Primitive::all_reduce, 2, 64 * kMi, DirectMode::always),
            DirectProtocol::push);
  for (int size = 3; size <= G::kMostRanks; ++size) {
    EXPECT_EQ(protocol_of(Primitive::all_reduce, size, 64 * kMi, DirectMode::always),
              DirectProtocol::two_shot);
    EXPECT_EQ(protocol_of(Primitive::all_gather, size, 64 * kMi, DirectMode::always),
              DirectProtocol::push);
  }
}

TEST(Direct, AProtocolThatIsAskedForIsTakenWhereItCan) {
  for (const Primitive primitive : kDirect) {
    for (const size_t bytes : {size_t{1}, 32 * kMi}) {
      EXPECT_EQ(protocol_of(primitive, 4, bytes, DirectMode::ll), DirectProtocol::ll);
      EXPECT_EQ(protocol_of(primitive, 4, bytes, DirectMode::push), DirectProtocol::push);
      EXPECT_EQ(
          protocol_of(primitive, 4, bytes, DirectMode::two_shot),
          primitive == Primitive::all_reduce ? DirectProtocol::two_shot : DirectProtocol::none);
      EXPECT_EQ(protocol_of(primitive, 4, bytes, DirectMode::off), DirectProtocol::none);
    }
  }
}

TEST(Direct, NothingToDoIsForNccl) {
  EXPECT_EQ(protocol_of(Primitive::all_reduce, 2, 0, DirectMode::always), DirectProtocol::none);
}

TEST(Direct, SplitsThatOnlyPairsKnowAreDirectWhereAskedFor) {
  DirectProblem problem = problem_of(Primitive::all_to_all, 4, 0);
  problem.is_uniform = false;
  EXPECT_FALSE(plan_direct(problem, DirectMode::automatic));
  const DirectPlan plan = plan_direct(problem, DirectMode::always);
  // Whatever this rank happens to send: the others see other sizes.
  problem.bytes = 123456;
  const DirectPlan other = plan_direct(problem, DirectMode::always);
  EXPECT_EQ(plan.protocol, DirectProtocol::push);
  EXPECT_EQ(plan.blocks, other.blocks);
  EXPECT_EQ(plan.chunk, other.chunk);
}

// Every plan fits the memory of a channel, and its rounds cover the message.
TEST(Direct, PlansFitTheMemory) {
  for (const Primitive primitive : kDirect) {
    for (int size = 2; size <= G::kMostRanks; ++size) {
      for (size_t bytes = 1; bytes < 64 * kMi; bytes += 1 + bytes / 3) {
        for (const size_t line_data : {8, 12}) {
          DirectProblem problem = problem_of(primitive, size, bytes);
          problem.line_data = line_data;
          const DirectPlan plan = plan_direct(problem, DirectMode::always);
          ASSERT_TRUE(plan) << bytes;
          ASSERT_GE(plan.blocks, 1);
          ASSERT_GE(plan.chunk, 1U);
          const bool has_lines = plan.protocol == DirectProtocol::ll;
          const bool is_two_shot = plan.protocol == DirectProtocol::two_shot;
          ASSERT_LE(plan.blocks, has_lines ? G::most_line_blocks(size) : most_push_blocks(size));
          ASSERT_LE(plan.chunk, has_lines ? G::kLines : G::kVectors / (is_two_shot ? 2 : 1));
          const size_t unit = has_lines ? line_data : G::kVectorBytes;
          const size_t part = is_two_shot ? (bytes + size - 1) / size : bytes;
          const size_t units = (part + unit - 1) / unit;
          const size_t chunks = (units + plan.chunk - 1) / plan.chunk;
          ASSERT_LE(chunks, 0xffffffffU);
          // No block without work in the first round.
          ASSERT_LE(static_cast<size_t>(plan.blocks), chunks + plan.blocks / 2 + 1);
        }
      }
    }
  }
}

TEST(Direct, LinesOfEightBytesEndSooner) {
  auto problem = problem_of(Primitive::all_reduce, 2, 4 * kMi);
  EXPECT_EQ(plan_direct(problem, DirectMode::automatic).protocol, DirectProtocol::ll);
  problem.line_data = 8;
  EXPECT_EQ(plan_direct(problem, DirectMode::automatic).protocol, DirectProtocol::push);
  problem.bytes = 2 * kMi;
  EXPECT_EQ(plan_direct(problem, DirectMode::automatic).protocol, DirectProtocol::ll);
}

TEST(Direct, LinesOfOneMessageAreOneRound) {
  for (const Primitive primitive : kDirect) {
    for (int size = 2; size <= G::kMostRanks; ++size) {
      for (size_t bytes = 1; bytes <= 256 * kKi; bytes += 1 + bytes / 7) {
        const DirectPlan plan =
            plan_direct(problem_of(primitive, size, bytes), DirectMode::automatic);
        if (plan.protocol != DirectProtocol::ll) continue;
        ASSERT_GE(static_cast<size_t>(plan.blocks) * plan.chunk * 12, bytes);
      }
    }
  }
}

TEST(Direct, ModesHaveNames) {
  EXPECT_EQ(parse_direct_mode("off", "hint"), DirectMode::off);
  EXPECT_EQ(parse_direct_mode("Auto", "hint"), DirectMode::automatic);
  EXPECT_EQ(parse_direct_mode("always", "hint"), DirectMode::always);
  try {
    (void)parse_direct_mode("maybe", "hint direct_collectives");
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kValue);
    EXPECT_STREQ(error.what(),
                 "hint direct_collectives: expected off, auto, always, ll, ll128, "
                 "push, two_shot, bulk or zero_copy, got 'maybe'");
  }
}

TEST(Direct, AnOperationsHintIsTaken) {
  EXPECT_FALSE(op_hints("op", {}).direct);
  EXPECT_EQ(op_hints("op", {{"direct_collectives", "off"}}).direct, DirectMode::off);
  EXPECT_THROW(op_hints("op", {{"direct_collectives", "1"}}), Error);
}

// --- Lines of 128 bytes --------------------------------------------------------------------------

DirectPlan ll128_plan(Primitive primitive, int size, size_t bytes, DirectMode mode) {
  auto problem = problem_of(primitive, size, bytes);
  problem.has_ll128 = true;
  return plan_direct(problem, mode);
}

TEST(Direct, WideLinesWantLinksThatCarryThem) {
  for (const Primitive primitive : kDirect) {
    for (int size = 2; size <= G::kMostRanks; ++size) {
      for (const size_t bytes : {size_t{1}, kMi, 256 * kMi}) {
        EXPECT_FALSE(plan_direct(problem_of(primitive, size, bytes), DirectMode::ll128));
        const DirectPlan plan = ll128_plan(primitive, size, bytes, DirectMode::ll128);
        EXPECT_EQ(plan.protocol, DirectProtocol::ll128);
        EXPECT_EQ(to_string(plan), "direct_ll128");
      }
    }
  }
}

// Every plan fits the memory of a channel, and its rounds cover the message.
TEST(Direct, PlansOfWideLinesFitTheMemory) {
  for (const Primitive primitive : kDirect) {
    for (int size = 2; size <= G::kMostRanks; ++size) {
      for (size_t bytes = 1; bytes < 64 * kMi; bytes += 1 + bytes / 3) {
        const DirectPlan plan = ll128_plan(primitive, size, bytes, DirectMode::ll128);
        ASSERT_GE(plan.blocks, 1);
        ASSERT_LE(plan.blocks, G::most_wide_blocks(size));
        ASSERT_GE(plan.chunk, 1U);
        ASSERT_LE(plan.chunk, static_cast<uint32_t>(G::kWideUnits));
        const size_t part = plan.has_slices ? (bytes + size - 1) / size : bytes;
        const size_t units = (part + G::kWideUnitData - 1) / G::kWideUnitData;
        const size_t chunks = (units + plan.chunk - 1) / plan.chunk;
        ASSERT_LE(static_cast<size_t>(plan.blocks), chunks + plan.blocks / 2 + 1);
      }
    }
  }
}

TEST(Direct, WideLinesOfManyRanksAddUpSlicesWhereThatSendsLess) {
  const auto has_slices = [](Primitive primitive, int size, size_t bytes) {
    return ll128_plan(primitive, size, bytes, DirectMode::ll128).has_slices;
  };
  for (int size = 3; size <= G::kMostRanks; ++size) {
    EXPECT_FALSE(has_slices(Primitive::all_reduce, size, 64 * kKi));
    EXPECT_TRUE(has_slices(Primitive::all_reduce, size, kMi));
    EXPECT_FALSE(has_slices(Primitive::reduce_scatter, size, 64 * kMi));
  }
  EXPECT_FALSE(has_slices(Primitive::all_reduce, 4, 384 * kKi));
  EXPECT_TRUE(has_slices(Primitive::all_reduce, 4, 416 * kKi));
  EXPECT_FALSE(has_slices(Primitive::all_reduce, 2, 64 * kMi));
}

TEST(Direct, WideLinesOfTwoRanksHaveWhatIsMoreThanShortOnesAreQuickerFor) {
  constexpr size_t kMost = 8 * kMi;
  constexpr std::pair<Primitive, size_t> kFew[] = {{Primitive::all_reduce, 8 * kKi},
                                                   {Primitive::all_gather, 0},
                                                   {Primitive::reduce_scatter, 0},
                                                   {Primitive::all_to_all, 0},
                                                   {Primitive::broadcast, 4 * kKi}};
  for (const auto& [primitive, few] : kFew) {
    for (const DirectMode mode : {DirectMode::automatic, DirectMode::always}) {
      if (few > 0) {
        EXPECT_EQ(ll128_plan(primitive, 2, few, mode).protocol, DirectProtocol::ll);
      }
      for (const size_t bytes : {few + 1, kMi + 1, kMost}) {
        EXPECT_EQ(ll128_plan(primitive, 2, bytes, mode).protocol, DirectProtocol::ll128);
      }
      EXPECT_NE(ll128_plan(primitive, 2, kMost + 1, mode).protocol, DirectProtocol::ll128);
    }
  }
}

TEST(Direct, WideLinesOfFourRanksHaveWhatIsMoreThanShortOnesAreQuickerFor) {
  constexpr std::pair<Primitive, size_t> kFew[] = {{Primitive::all_reduce, 64 * kKi},
                                                   {Primitive::all_gather, 16 * kKi},
                                                   {Primitive::reduce_scatter, 4 * kKi},
                                                   {Primitive::all_to_all, 4 * kKi},
                                                   {Primitive::broadcast, 64 * kKi}};
  for (const auto& [primitive, few] : kFew) {
    for (const DirectMode mode : {DirectMode::automatic, DirectMode::always}) {
      EXPECT_EQ(ll128_plan(primitive, 4, few, mode).protocol, DirectProtocol::ll);
      for (const size_t bytes : {few + 1, 256 * kKi}) {
        EXPECT_EQ(ll128_plan(primitive, 4, bytes, mode).protocol, DirectProtocol::ll128);
      }
      EXPECT_NE(ll128_plan(primitive, 4, 16 * kMi + 1, mode).protocol, DirectProtocol::ll128);
      EXPECT_EQ(ll128_plan(primitive, 8, 4 * kKi, mode).protocol, DirectProtocol::ll);
    }
  }
}

TEST(Direct, ShortLinesOfEightBytesAreTakenForAsManyLines) {
  auto problem = problem_of(Primitive::all_reduce, 4, 64 * kKi * 8 / 12);
  problem.has_ll128 = true;
  problem.line_data = 8;
  EXPECT_EQ(plan_direct(problem, DirectMode::automatic).protocol, DirectProtocol::ll);
  problem.bytes += 8;
  EXPECT_EQ(plan_direct(problem, DirectMode::automatic).protocol, DirectProtocol::ll128);
}

TEST(Direct, WideLinesLeaveLargeMessagesToBulkCopiesThatAreToTakeFewBlocks) {
  for (const Primitive primitive : kDirect) {
    auto problem = problem_of(primitive, 2, 4 * kMi);
    problem.has_ll128 = true;
    problem.most_bulk_blocks = 8;
    EXPECT_EQ(plan_direct(problem, DirectMode::automatic).protocol, DirectProtocol::ll128);
    problem.has_few_blocks = true;
    const DirectPlan plan = plan_direct(problem, DirectMode::automatic);
    EXPECT_EQ(plan.protocol, DirectProtocol::bulk);
    EXPECT_LE(plan.blocks, 8);
    problem.bytes = kMi;
    EXPECT_EQ(plan_direct(problem, DirectMode::automatic).protocol, DirectProtocol::ll128);
  }
}

// What fits into one round is not cut into two, and no warp of a block waits for the others'.
TEST(Direct, WideLinesHaveFewRoundsOfAUnitForEachWarp) {
  const auto rounds_of = [](int size, size_t units) {
    const auto plan =
        ll128_plan(Primitive::all_gather, size, units * G::kWideUnitData, DirectMode::ll128);
    EXPECT_LE(plan.chunk, static_cast<uint32_t>(G::kThreads / 32));
    const size_t of_round = size_t{plan.chunk} * plan.blocks;
    const size_t rounds = (units + of_round - 1) / of_round;
    EXPECT_LT(of_round * rounds - units, rounds * plan.blocks);  // which are alike
    return rounds;
  };
  for (const int size : {2, 4, 8}) {
    const size_t all = G::most_wide_blocks(size);
    for (size_t units = 1; units <= all * 8; ++units) EXPECT_EQ(rounds_of(size, units), 1U);
    EXPECT_EQ(rounds_of(size, all * 8 + 1), 2U);
    EXPECT_EQ(rounds_of(size, all * 80), 10U);
  }
}

TEST(Direct, WideLinesOfSplitsThatOnlyPairsKnowTakeAllThereIs) {
  DirectProblem problem = problem_of(Primitive::all_to_all, 4, 0);
  problem.is_uniform = false;
  EXPECT_FALSE(plan_direct(problem, DirectMode::ll128));
  problem.has_ll128 = true;
  const DirectPlan plan = plan_direct(problem, DirectMode::ll128);
  EXPECT_EQ(plan.protocol, DirectProtocol::ll128);
  EXPECT_EQ(plan.blocks, G::most_wide_blocks(4));
  EXPECT_EQ(plan.chunk, static_cast<uint32_t>(G::kWideUnits));
}

// --- Bulk copies ---------------------------------------------------------------------------------

DirectPlan bulk_plan(Primitive primitive, int size, size_t bytes, DirectMode mode) {
  auto problem = problem_of(primitive, size, bytes);
  problem.most_bulk_blocks = 66;
  return plan_direct(problem, mode);
}

TEST(Direct, BulkCopiesWantWholeVectorsAndAGpuThatHasThem) {
  for (const Primitive primitive : kDirect) {
    for (int size = 2; size <= G::kMostRanks; ++size) {
      for (const size_t bytes : {size_t{16}, kMi, 256 * kMi}) {
        const DirectPlan plan = bulk_plan(primitive, size, bytes, DirectMode::bulk);
        EXPECT_EQ(plan.protocol, DirectProtocol::bulk);
        EXPECT_EQ(to_string(plan), "direct_bulk");
        EXPECT_FALSE(bulk_plan(primitive, size, bytes + 8, DirectMode::bulk));
        EXPECT_FALSE(plan_direct(problem_of(primitive, size, bytes), DirectMode::bulk));
      }
    }
  }
}

TEST(Direct, BulkCopiesTakeWhatIsLarge) {
  for (const Primitive primitive : kDirect) {
    const auto of_two = [&](size_t bytes, DirectMode mode = DirectMode::automatic) {
      return bulk_plan(primitive, 2, bytes, mode).protocol;
    };
    EXPECT_EQ(of_two(4 * kMi), DirectProtocol::ll);
    EXPECT_EQ(of_two(4 * kMi + 16), DirectProtocol::bulk);
    EXPECT_EQ(of_two(8 * kMi + 8), DirectProtocol::push);
    EXPECT_EQ(of_two(1024 * kMi), DirectProtocol::bulk);
    EXPECT_EQ(of_two(1024 * kMi + 8), DirectProtocol::none);
    EXPECT_EQ(of_two(1024 * kMi + 8, DirectMode::always), DirectProtocol::push);
    for (int size = 3; size <= G::kMostRanks; ++size) {
      EXPECT_NE(bulk_plan(primitive, size, 8 * kMi, DirectMode::automatic).protocol,
                DirectProtocol::bulk);
      EXPECT_EQ(bulk_plan(primitive, size, 64 * kMi, DirectMode::always).protocol,
                DirectProtocol::bulk);
    }
  }
}

TEST(Direct, BulkCopiesTakeNoMoreBlocksThanTheyMay) {
  auto problem = problem_of(Primitive::all_gather, 2, 64 * kMi);
  for (const int most : {1, 24, 64, 1000}) {
    problem.most_bulk_blocks = most;
    EXPECT_EQ(plan_direct(problem, DirectMode::automatic).blocks, std::min(most, 64));
  }
}

// Every plan fits the memory of a channel, and its rounds cover the message.
TEST(Direct, PlansOfBulkCopiesFitTheMemory) {
  for (const Primitive primitive : kDirect) {
    for (int size = 2; size <= G::kMostRanks; ++size) {
      for (size_t bytes = 16; bytes < 64 * kMi; bytes += 16 + bytes / 48 * 16) {
        const DirectPlan plan = bulk_plan(primitive, size, bytes, DirectMode::bulk);
        ASSERT_GE(plan.blocks, 1);
        ASSERT_LE(plan.blocks, G::most_bulk_blocks(size));
        ASSERT_GE(plan.chunk, 1U);
        ASSERT_LE(plan.chunk * G::kVectorBytes, G::bulk_bytes(size));
        ASSERT_EQ(plan.has_slices, primitive == Primitive::all_reduce && size > 2);
        const size_t part = plan.has_slices ? (bytes + size - 1) / size : bytes;
        const size_t vectors = (part + G::kVectorBytes - 1) / G::kVectorBytes;
        const size_t chunks = (vectors + plan.chunk - 1) / plan.chunk;
        ASSERT_LE(static_cast<size_t>(plan.blocks), chunks + plan.blocks / 2 + 1);
      }
    }
  }
}

// --- Tensors in windows --------------------------------------------------------------------------

DirectPlan window_plan(Primitive primitive, int size, size_t bytes, DirectMode mode) {
  auto problem = problem_of(primitive, size, bytes);
  problem.has_windows = true;
  return plan_direct(problem, mode);
}

TEST(Direct, ZeroCopyWantsAWindowAndWholeVectors) {
  for (const Primitive primitive : kDirect) {
    for (int size = 2; size <= G::kMostRanks; ++size) {
      for (const size_t bytes : {size_t{16}, kMi, 256 * kMi}) {
        EXPECT_FALSE(plan_direct(problem_of(primitive, size, bytes), DirectMode::zero_copy));
        EXPECT_FALSE(window_plan(primitive, size, bytes + 8, DirectMode::zero_copy));
        const DirectPlan plan = window_plan(primitive, size, bytes, DirectMode::zero_copy);
        EXPECT_TRUE(plan.zero_copy);
        EXPECT_EQ(to_string(plan), "direct_zero_copy");
        EXPECT_EQ(plan.protocol, primitive == Primitive::all_reduce && size > 2
                                     ? DirectProtocol::two_shot
                                     : DirectProtocol::push);
      }
    }
  }
}

// The same launch as without, so that ranks whose tensors lie elsewhere are served by it.
TEST(Direct, ZeroCopyHasTheBlocksOfWhatItFallsBackTo) {
  for (const Primitive primitive : kDirect) {
    for (int size = 2; size <= G::kMostRanks; ++size) {
      for (size_t bytes = 16; bytes < 64 * kMi; bytes += 16 + bytes / 48 * 16) {
        const DirectPlan with = window_plan(primitive, size, bytes, DirectMode::zero_copy);
        const bool has_slices = with.protocol == DirectProtocol::two_shot;
        const DirectPlan without =
            plan_direct(problem_of(primitive, size, bytes),
                        has_slices ? DirectMode::two_shot : DirectMode::push);
        EXPECT_EQ(with.protocol, without.protocol);
        EXPECT_EQ(with.blocks, without.blocks);
        EXPECT_EQ(with.chunk, without.chunk);
      }
    }
  }
}

// But for large gathers of four ranks.
TEST(Direct, WindowsChangeNothingThatIsSmallOrNotAskedFor) {
  for (const Primitive primitive : kDirect) {
    for (int size = 2; size <= G::kMostRanks; ++size) {
      EXPECT_EQ(window_plan(primitive, size, 64 * kKi, DirectMode::automatic).protocol,
                DirectProtocol::ll);
      for (const size_t bytes : {kMi, 8 * kMi, 256 * kMi}) {
        const bool gains = primitive == Primitive::all_gather && size > 2 && size <= 4;
        EXPECT_EQ(window_plan(primitive, size, bytes, DirectMode::automatic).zero_copy,
                  gains && bytes > kMi);
      }
      EXPECT_TRUE(window_plan(primitive, size, 256 * kMi, DirectMode::always).zero_copy);
      for (const DirectMode mode : {DirectMode::ll, DirectMode::push}) {
        EXPECT_FALSE(window_plan(primitive, size, kMi, mode).zero_copy);
      }
      EXPECT_FALSE(window_plan(primitive, size, kMi, DirectMode::off));
    }
  }
}

// --- With an RMSNorm of rows ---------------------------------------------------------------------

DirectPlan norm_plan(int size, size_t rows, size_t row_bytes, DirectMode mode) {
  auto problem = problem_of(Primitive::all_reduce, size, rows * row_bytes);
  problem.row_bytes = row_bytes;
  return plan_direct(problem, mode);
}

TEST(DirectNorm, ClustersHaveWholeRows) {
  for (int size = 2; size <= G::kMostRanks; ++size) {
    for (const size_t rows : {1, 3, 16, 64, 500}) {
      for (const size_t row_bytes : {2, 254, 2000, 8208, 10240, 16384, 24576, 65536}) {
        for (const DirectMode mode : {DirectMode::automatic, DirectMode::ll, DirectMode::push}) {
          const auto plan = norm_plan(size, rows, row_bytes, mode);
          if (plan.row_blocks == 0) continue;
          const bool has_lines = plan.protocol == DirectProtocol::ll;
          const size_t unit = has_lines ? 12 : G::kVectorBytes;
          const size_t room = plan.row_blocks * plan.chunk * unit;
          EXPECT_LE(plan.row_blocks, G::kMostRowBlocks);
          EXPECT_EQ(plan.blocks % plan.row_blocks, 0);
          EXPECT_LE(plan.blocks, has_lines ? G::most_line_blocks(size) : most_push_blocks(size));
          EXPECT_LE(plan.blocks, static_cast<int>(rows) * plan.row_blocks);
          EXPECT_LE(plan.chunk, static_cast<uint32_t>(has_lines ? G::kLines : G::kVectors));
          if (has_lines) {
            EXPECT_GE(room, row_bytes);
            EXPECT_LT(room - row_bytes, plan.row_blocks * unit + unit);
          } else {
            EXPECT_EQ(room, row_bytes);  // chunks follow each other without a gap
          }
        }
      }
    }
  }
}

TEST(DirectNorm, SmallMessagesAloneAndWhatFits) {
  EXPECT_EQ(norm_plan(4, 16, 16384, DirectMode::automatic).protocol, DirectProtocol::ll);
  EXPECT_EQ(norm_plan(4, 16, 16384, DirectMode::automatic).row_blocks, 6);
  EXPECT_EQ(norm_plan(4, 64, 16384, DirectMode::automatic).protocol, DirectProtocol::push);
  EXPECT_EQ(norm_plan(4, 64, 16384, DirectMode::automatic).row_blocks, 2);
  // The sum alone: too large for a norm in the kernel, rows that no cluster holds, other modes.
  EXPECT_EQ(norm_plan(4, 65, 16384, DirectMode::automatic).row_blocks, 0);
  EXPECT_EQ(norm_plan(4, 65, 16384, DirectMode::automatic).protocol, DirectProtocol::two_shot);
  EXPECT_EQ(norm_plan(2, 1, 80000, DirectMode::ll).row_blocks, 0);
  EXPECT_EQ(norm_plan(2, 3, 16384, DirectMode::two_shot).row_blocks, 0);
  EXPECT_FALSE(norm_plan(2, 3, 16384, DirectMode::off));
  EXPECT_EQ(norm_plan(8, 32, 16384, DirectMode::automatic).row_blocks, 0);
  // Vectors that do not fill rows: lines, or the sum alone.
  EXPECT_EQ(norm_plan(2, 20, 8200, DirectMode::automatic).protocol, DirectProtocol::ll);
  EXPECT_EQ(norm_plan(2, 100, 8200, DirectMode::automatic).row_blocks, 0);
  EXPECT_EQ(norm_plan(2, 100, 8200, DirectMode::push).row_blocks, 0);
}

}  // namespace
}  // namespace torch_overlap
