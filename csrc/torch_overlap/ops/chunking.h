#pragma once

#include <cstdint>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/base/index_range.h"

// Splits rows into pieces for the overlapped operators. overlap/schedule.h orders the chunks.
namespace torch_overlap::ops {

// Splits [0, rows) into at most `count` consecutive, non-empty pieces whose lengths differ by at
// most `unit` rows. Each piece is a multiple of `unit`, as `rows` is.
TORCH_OVERLAP_API std::vector<IndexRange> row_chunks(int64_t rows, int64_t count, int64_t unit = 1);

}  // namespace torch_overlap::ops
