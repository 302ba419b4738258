#pragma once

#include <array>
#include <limits>
#include <optional>

// Tile selection without measurements.
namespace torch_overlap::sm90 {

// A tile of the kernels, and its cost per output relative to the first tile, if there are many
// tiles (benchmarks/own_gemm.py).
struct TileCost {
  int rows;
  int columns;
  double cost;

  // Returns the time of one tile relative to that of the first.
  constexpr double time() const { return cost * rows * columns / (128 * 256); }
};
inline constexpr std::array kTileCosts{TileCost{128, 256, 1.0}, TileCost{128, 224, 1.0},
                                       TileCost{128, 192, 0.98}, TileCost{128, 128, 1.2},
                                       TileCost{64, 256, 1.1}};

constexpr const TileCost& find_tile_cost(int rows, int columns) {
  for (const TileCost& tile : kTileCosts) {
    if (tile.rows == rows && tile.columns == columns) return tile;
  }
  return kTileCosts[0];
}

// Returns the tile with the least `time(tile)`, ignoring tiles for which it is empty. Null if all
// are.
template <typename Time>
const TileCost* fastest_tile(const Time& time) {
  const TileCost* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const TileCost& tile : kTileCosts) {
    const std::optional<double> found = time(tile);
    if (!found || *found >= least) continue;
    least = *found;
    best = &tile;
  }
  return best;
}

}  // namespace torch_overlap::sm90
