#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "torch_overlap/overlap/cuda/fused_host.h"

namespace torch_overlap::cuda {
namespace {

using sm90::ElementType;
using sm90::KernelKey;
using sm90::OperandType;

constexpr int kSms = 132;
constexpr KernelKey kBf16{
    OperandType::bf16, OperandType::bf16, ElementType::bf16, /*is_rhs_k_major=*/true, 0, 0};
constexpr KernelKey kE4m3{
    OperandType::e4m3, OperandType::e4m3, ElementType::bf16, /*is_rhs_k_major=*/true, 0, 0};

using Tile = std::pair<int, int>;

// senders: number of blocks of the kernel that send; 0: copies bring the rows.
Tile tile_of(const KernelKey& key, int size, int64_t m, int64_t n, int64_t k, int senders = 0) {
  std::vector<int> order;
  for (int step = 0; step < size; ++step) order.push_back((1 + step) % size);
  const auto& kernel = choose_gather_kernel(key, {{m, size}, order, n, k}, kSms, senders);
  return {kernel.rows, kernel.columns};
}

// m of all ranks, n of one.
TEST(FusedGatherTile, TakesTheLeastTime) {
  const struct {
    int size;
    int64_t m, n, k;
    Tile tile;
  } cases[] = {
      {2, 2048, 7168, 4096, {128, 224}},  // 2 x 64 tiles of 2 x 128 rows in 2 x 66: no wave of both
      {4, 2048, 3584, 4096, {128, 224}},  // 128 in two waves; 152 of 192 columns would be three
      {4, 8192, 2560, 8192, {128, 256}},  // 320 in five waves; 448 of 192 columns in seven
      {2, 2048, 2048, 4096, {128, 128}},  // one wave of own tiles while the others arrive
      {4, 2048, 1024, 4096, {128, 128}},  // a tile for every SM
      {4, 8192, 14336, 8192, {128, 192}},  // many tiles: the shape with the least time per output
      {2, 1000, 7112, 264, {128, 224}},   {4, 2000, 7112, 264, {128, 224}},
      {2, 1, 8, 8, {128, 128}},
  };
  for (const auto& [size, m, n, k, tile] : cases) {
    SCOPED_TRACE(::testing::Message() << size << " ranks, " << m << " x " << n << " x " << k);
    EXPECT_EQ(tile_of(kBf16, size, m, n, k), tile);
  }
}

// Chunks that arrive slice by slice are computed as they arrive.
TEST(FusedGatherTile, TakesTheLeastTimeWhereBlocksSend) {
  constexpr int kSenders = 8;
  const struct {
    int size;
    int64_t m, n, k;
    Tile tile;
  } cases[] = {
      {4,
       2048,
       1024,
       4096,
       {128, 128}},  // own tiles are first; each tile of other ranks' rows has a block
      {4,
       2048,
       3584,
       4096,
       {128, 192}},  // with 256 columns, some are second after a first that waits
      {4, 2048, 1344, 4096, {128, 192}},  // a tile for every block; smaller ones end sooner
  };
  for (const auto& [size, m, n, k, tile] : cases) {
    SCOPED_TRACE(::testing::Message() << size << " ranks, " << m << " x " << n << " x " << k);
    EXPECT_EQ(tile_of(kBf16, size, m, n, k, kSenders), tile);
  }
}

// Half of the bytes arrive in half of the time, and half of the stages need half of the time.
TEST(FusedGatherTile, IsTheSameForEightBits) {
  for (const int size : {2, 4}) {
    EXPECT_EQ(tile_of(kE4m3, size, 2048, 14336 / size, 4096), Tile(128, 224));
    EXPECT_EQ(tile_of(kE4m3, size, 500 * size, 7112, 272), Tile(128, 224));
  }
}

TEST(FusedGatherTile, EveryOneIsThereForAllTypes) {
  using enum OperandType;
  const struct {
    OperandType lhs, rhs;
    bool is_k_major;
  } operands[] = {{bf16, bf16, true}, {bf16, bf16, false}, {f16, f16, true},  {f16, f16, false},
                  {e4m3, e4m3, true}, {e4m3, e5m2, true},  {e5m2, e4m3, true}};
  for (const auto& [lhs, rhs, is_k_major] : operands) {
    const KernelKey key{lhs,        rhs, lhs == f16 ? ElementType::f16 : ElementType::bf16,
                        is_k_major, 0,   0};
    EXPECT_EQ(tile_of(key, 4, 2048, 3584, 4096), Tile(128, 224));
    EXPECT_EQ(tile_of(key, 4, 8192, 14336, 8192), Tile(128, 192));
    EXPECT_EQ(tile_of(key, 4, 2048, 1024, 4096), Tile(128, 128));
  }
}

FusedReduceScatter scatter_of(at::ScalarType dtype, int size, int64_t rows, int64_t n, int64_t k) {
  const RowPartition share{rows, size};
  const auto like = [](at::ScalarType type) { return at::TensorOptions(at::kMeta).dtype(type); };
  FusedReduceScatter problem;
  problem.gemm.lhs.data = at::empty({rows, k}, like(dtype));
  problem.gemm.rhs.data = at::empty({n, k}, like(dtype));
  problem.gemm.rhs.transposed = true;
  problem.rows = share;
  problem.out = at::empty({share.largest(), n}, like(at::kBFloat16));
  return problem;
}

// Rows of all ranks; k of one.
TEST(FusedReduceScatterPieces, ArePlannedByWhatLinksTakeBesideTheProducts) {
  constexpr auto bf16 = at::kBFloat16;
  constexpr auto e4m3 = at::kFloat8_e4m3fn;
  const struct {
    at::ScalarType dtype;
    int size;
    int64_t rows, n, k;
    int pieces;
  } cases[] = {
      {bf16, 2, 8192, 8192, 4096, 0}, {bf16, 2, 8192, 8192, 2048, 2},
      {bf16, 2, 8192, 4096, 7168, 0}, {bf16, 4, 8192, 8192, 2048, 2},
      {bf16, 4, 8192, 8192, 7168, 0}, {e4m3, 2, 8192, 8192, 4096, 2},
      {e4m3, 2, 8192, 4096, 7168, 0}, {e4m3, 2, 2048, 4096, 2048, 0},  // equally fast with it
      {bf16, 2, 4094, 4096, 64, 0},   {bf16, 2, 4096, 4096, 64, 2},
      {bf16, 4, 2048, 5462, 64, 1},   {bf16, 4, 2048, 5461, 64, 0},
      {bf16, 1, 8192, 8192, 64, 0},   {bf16, 2, 2, 10'000'000, 64, 2},
  };
  for (const auto& [dtype, size, rows, n, k, pieces] : cases) {
    SCOPED_TRACE(::testing::Message() << size << " ranks, " << rows << " x " << n << " x " << k);
    const auto problem = scatter_of(dtype, size, rows, n, k);
    EXPECT_EQ(num_reduce_scatter_pieces(problem, 4, kSms), pieces);
    EXPECT_EQ(num_reduce_scatter_pieces(problem, 1, kSms), std::min(pieces, 1));
  }
}

// The choice depends only on values that are equal on all ranks.
TEST(FusedReduceScatterPieces, DoNotDependOnKWhereRanksMayDifferInIt) {
  for (const int64_t k : {64, 2688, 28672}) {
    auto problem = scatter_of(at::kBFloat16, 2, 8192, 8192, k);
    problem.ranks_share_k = false;
    EXPECT_EQ(num_reduce_scatter_pieces(problem, 4, kSms), 2) << k;
  }
}

}  // namespace
}  // namespace torch_overlap::cuda
