#include "torch_overlap/ops/chunking.h"

#include <algorithm>

namespace torch_overlap::ops {

std::vector<IndexRange> row_chunks(int64_t rows, int64_t count, int64_t unit) {
  const int64_t units = rows / unit;
  count = std::clamp<int64_t>(count, 1, std::max<int64_t>(units, 1));
  std::vector<IndexRange> chunks;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = units * i / count * unit;
    chunks.push_back({begin, units * (i + 1) / count * unit - begin});
  }
  return chunks;
}

}  // namespace torch_overlap::ops
