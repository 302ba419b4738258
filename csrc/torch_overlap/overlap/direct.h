#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "torch_overlap/overlap/schedule.h"
#include "torch_overlap/symm/begin.h"

// Collectives of an operand that lies in a channel, of which a device may do all in one kernel: an
// operation by itself, whose entry and end the ranks tell each other in the kernel.
namespace torch_overlap {

// The sum of what all ranks have at `at` of their data, [rows, columns] each, in rank order.
struct DirectSum {
  RowShare rows;
  int64_t at = 0;
  int64_t sums_at = 0;  // room for the largest part of the rows, for sums that others take
  // Every rank gets all rows; else its own.
  bool everywhere = false;
  at::Tensor out;  // [rows, columns] or [length, columns], contiguous
  double factor = 1;
  at::Tensor bias;  // [columns] of this rank, contiguous; or undefined

  Begin begin() const {
    return {.rows = rows.rows, .way = everywhere ? Way::everywhere() : Way::chunks()};
  }
  int64_t columns() const { return out.size(1); }
  int64_t row_bytes() const { return columns() * static_cast<int64_t>(out.element_size()); }
  bool in_one_shot() const {
    return !everywhere || sums_in_one_shot(rows.rows * row_bytes(), rows.size);
  }
};

// All ranks' rows, from `at` of the data on.
struct DirectGather {
  RowShare rows;
  at::Tensor own;  // [length, columns], contiguous
  int64_t at = 0;
};

}  // namespace torch_overlap
