#include "torch_overlap/ops/chunking.h"

#include <algorithm>

namespace torch_overlap::ops {

std::vector<RowRange> row_chunks(int64_t rows, int64_t count) {
  count = std::clamp<int64_t>(count, 1, std::max<int64_t>(rows, 1));
  std::vector<RowRange> chunks;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = rows * i / count;
    chunks.push_back({begin, rows * (i + 1) / count - begin});
  }
  return chunks;
}

}  // namespace torch_overlap::ops
