#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "torch_overlap/overlap/cuda/fused_host.h"

namespace torch_overlap::cuda {
namespace {

using sm90::KernelKey;
using sm90::OperandType;
using sm90::VectorType;

constexpr int kSms = 132;
constexpr KernelKey kBf16{
    OperandType::bf16, OperandType::bf16, VectorType::bf16, /*rhs_along_k=*/true, 0, 0};
constexpr KernelKey kE4m3{
    OperandType::e4m3, OperandType::e4m3, VectorType::bf16, /*rhs_along_k=*/true, 0, 0};

using Tile = std::pair<int, int>;

Tile tile_of(const KernelKey& key, int size, int64_t m, int64_t n, int64_t k) {
  std::vector<int> order;
  for (int step = 0; step < size; ++step) order.push_back((1 + step) % size);
  const auto& kernel = choose_gather_kernel(key, {{m, size}, order, n, k}, kSms);
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
      {2, 2048, 2048, 4096, {128, 128}},  // one wave of own tiles while the others come
      {4, 2048, 1024, 4096, {128, 128}},  // a tile for every SM
      {4, 8192, 14336, 8192, {128, 192}},  // many: the one with the least for an output
      {2, 1000, 7112, 264, {128, 224}},   {4, 2000, 7112, 264, {128, 224}},
      {2, 1, 8, 8, {128, 128}},
  };
  for (const auto& [size, m, n, k, tile] : cases) {
    SCOPED_TRACE(::testing::Message() << size << " ranks, " << m << " x " << n << " x " << k);
    EXPECT_EQ(tile_of(kBf16, size, m, n, k), tile);
  }
}

// Half the bytes come in half the time, and half the stages take half the time.
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
    bool along_k;
  } operands[] = {{bf16, bf16, true}, {bf16, bf16, false}, {f16, f16, true},  {f16, f16, false},
                  {e4m3, e4m3, true}, {e4m3, e5m2, true},  {e5m2, e4m3, true}};
  for (const auto& [lhs, rhs, along_k] : operands) {
    const KernelKey key{lhs, rhs, lhs == f16 ? VectorType::f16 : VectorType::bf16, along_k, 0, 0};
    EXPECT_EQ(tile_of(key, 4, 2048, 3584, 4096), Tile(128, 224));
    EXPECT_EQ(tile_of(key, 4, 8192, 14336, 8192), Tile(128, 192));
    EXPECT_EQ(tile_of(key, 4, 2048, 1024, 4096), Tile(128, 128));
  }
}

FusedScatter scatter_of(int size, int64_t rows, int64_t n) {
  const RowShare share{rows, size};
  return {.gemm = {}, .rows = share, .out = at::empty({share.largest(), n}, at::kBFloat16)};
}

// Rows of all ranks.
TEST(FusedScatterPieces, ArePlannedByWhatGoesToOneRank) {
  const struct {
    int size;
    int64_t rows, n;
    int pieces;
  } cases[] = {
      {2, 2046, 4096, 0}, {2, 2048, 4096, 1},   {2, 4096, 4096, 2}, {2, 8192, 8192, 2},
      {4, 4092, 4096, 0}, {4, 8192, 4096, 2},   {8, 8192, 8192, 2}, {8, 2048, 4096, 0},
      {1, 8192, 8192, 0}, {2, 2, 8'000'000, 2},
  };
  for (const auto& [size, rows, n, pieces] : cases) {
    SCOPED_TRACE(::testing::Message() << size << " ranks, " << rows << " x " << n);
    EXPECT_EQ(scatter_pieces(scatter_of(size, rows, n), 4), pieces);
    EXPECT_EQ(scatter_pieces(scatter_of(size, rows, n), 1), std::min(pieces, 1));
  }
}

}  // namespace
}  // namespace torch_overlap::cuda
