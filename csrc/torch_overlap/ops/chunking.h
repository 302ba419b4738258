#pragma once

#include <cstdint>
#include <vector>

#include "torch_overlap/base/export.h"

// How the fused operators cut rows into pieces. Which chunk goes where: overlap/schedule.h.
namespace torch_overlap::ops {

// [0, rows) in at most `count` consecutive pieces that differ by `unit` rows at most, none empty.
// They are multiples of unit, as rows is.
struct RowRange {
  int64_t begin;
  int64_t length;
};
TORCH_OVERLAP_API std::vector<RowRange> row_chunks(int64_t rows, int64_t count, int64_t unit = 1);

}  // namespace torch_overlap::ops
