#pragma once

#include <array>
#include <limits>
#include <optional>

// Which tile to take where nothing was measured.
namespace torch_overlap::sm90 {

// A tile that kernels may have, and how much longer than the first it takes for each output where
// there are many tiles (benchmarks/own_gemm.py).
struct TimedTile {
  int rows;
  int columns;
  double cost;

  // As a part of that of the first tile.
  constexpr double time() const { return cost * rows * columns / (128 * 256); }
};
inline constexpr std::array kTiles{TimedTile{128, 256, 1.0}, TimedTile{128, 224, 1.0},
                                   TimedTile{128, 192, 0.98}, TimedTile{128, 128, 1.2},
                                   TimedTile{64, 256, 1.1}};

constexpr const TimedTile& timed_tile(int rows, int columns) {
  for (const TimedTile& tile : kTiles) {
    if (tile.rows == rows && tile.columns == columns) return tile;
  }
  return kTiles[0];
}

// The one with the least `time(tile)`; those for which that is empty are left out. Null: all are.
template <typename Time>
const TimedTile* quickest_tile(const Time& time) {
  const TimedTile* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const TimedTile& tile : kTiles) {
    const std::optional<double> found = time(tile);
    if (!found || *found >= least) continue;
    least = *found;
    best = &tile;
  }
  return best;
}

}  // namespace torch_overlap::sm90
