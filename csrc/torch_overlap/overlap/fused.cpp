#include "torch_overlap/overlap/fused.h"

#include <algorithm>

namespace torch_overlap {

int64_t FusedReduceScatter::piece_rows() const {
  constexpr int64_t kTileRows = 128;
  const auto of_largest = torch_overlap::pieces(rows.largest(), pieces, kTileRows);
  return of_largest.empty() ? kTileRows : of_largest[0].length;
}

std::vector<IndexRange> FusedReduceScatter::pieces_of(int rank) const {
  std::vector<IndexRange> all;
  const int64_t most = piece_rows();
  const int64_t length = rows.length(rank);
  for (int64_t begin = 0; begin < length; begin += most) {
    all.push_back({begin, std::min(most, length - begin)});
  }
  return all;
}

}  // namespace torch_overlap
