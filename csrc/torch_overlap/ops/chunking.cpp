#include "torch_overlap/ops/chunking.h"

#include <algorithm>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::ops {
namespace {

// Below this many rows a chunk's GEMM takes less time than issuing its transfer: a GEMM of 256 x
// 4096 x 4096 takes about 15 us on an H200.
constexpr int64_t kMinChunkRows = 256;

}  // namespace

std::vector<GatherStep> gather_schedule(int rank, int size) {
  std::vector<GatherStep> steps;
  for (int i = 0; i < size; ++i) steps.push_back({(rank - i + size) % size, (rank + i) % size});
  return steps;
}

std::vector<ScatterStep> scatter_schedule(int rank, int size) {
  std::vector<ScatterStep> steps;
  for (int i = 1; i <= size; ++i) steps.push_back({(rank + i) % size, (rank - i + size) % size});
  return steps;
}

std::vector<RowRange> row_chunks(int64_t rows, int64_t count) {
  count = std::clamp<int64_t>(count, 1, std::max<int64_t>(rows, 1));
  std::vector<RowRange> chunks;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = rows * i / count;
    chunks.push_back({begin, rows * (i + 1) / count - begin});
  }
  return chunks;
}

void check_algorithm(std::string_view op, std::string_view algorithm) {
  TORCH_OVERLAP_CHECK(
      algorithm == "auto" || algorithm == "sequential" || algorithm == "chunked", kValue, op,
      ": expected algorithm to be one of auto, sequential, chunked, got '", algorithm, "'");
}

Algorithm choose_algorithm(std::string_view op, std::string_view algorithm, int64_t chunk_rows,
                           int64_t group_size) {
  check_algorithm(op, algorithm);
  if (algorithm == "sequential") return Algorithm::kSequential;
  if (algorithm == "chunked") return Algorithm::kChunked;
  return group_size > 1 && chunk_rows >= kMinChunkRows ? Algorithm::kChunked
                                                       : Algorithm::kSequential;
}

}  // namespace torch_overlap::ops
