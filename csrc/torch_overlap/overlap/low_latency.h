#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "torch_overlap/overlap/schedule.h"
#include "torch_overlap/symm/op_signature.h"

// Collectives on an operand in a channel, which a device may run in one kernel: an operation by
// itself, which the ranks enter and leave in the kernel.
namespace torch_overlap {

// The sum over ranks of the [rows, columns] at offset `at` of every rank's data, in rank order.
struct LowLatencySum {
  RowPartition rows;
  int64_t at = 0;
  int64_t sums_offset = 0;  // offset in bytes of this rank's sums, which other ranks read
  // Every rank gets all rows; otherwise only its own.
  bool is_all_reduce = false;
  at::Tensor out;  // [rows, columns] or [length, columns], contiguous
  double factor = 1;
  at::Tensor bias;  // [columns] of this rank, contiguous; or undefined

  EntryPayload entry() const {
    return {.rows = rows.rows,
            .signature = is_all_reduce ? OpSignature::all_reduce_rows() : OpSignature::chunks()};
  }
  int64_t columns() const { return out.size(1); }
  int64_t row_bytes() const { return columns() * static_cast<int64_t>(out.element_size()); }
  bool is_one_shot() const {
    return !is_all_reduce || uses_one_shot(rows.rows * row_bytes(), rows.size);
  }
};

// All-gather of every rank's rows, to offset `at` of the data.
struct LowLatencyGather {
  RowPartition rows;
  at::Tensor own;  // [length, columns], contiguous
  int64_t at = 0;
};

}  // namespace torch_overlap
