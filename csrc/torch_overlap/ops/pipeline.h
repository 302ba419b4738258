#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/ops/chunking.h"
#include "torch_overlap/overlap/schedule.h"

// The pipelined executors: transfers run on the communicator's stream (on a CPU, in its background
// thread) while the caller's GEMMs run on the current stream. They are device-neutral and safe to
// capture in a CUDA graph, because they never query the device from the host. An executor is used
// by one thread, inside one operator call.
namespace torch_overlap::ops {

// A named range of host time in a profile, e.g. "torch_overlap::chunk_gemm[2]". Free when no
// profiler is active. In a timeline these ranges show that transfer i+1 is issued before GEMM i
// ends.
class ProfilerRange {
 public:
  ProfilerRange(std::string_view name, size_t index);

 private:
  at::RecordFunction record_;
};

// Rows of all ranks, gathered chunk by chunk in the order of gather_schedule(all_pairs).
class GatherPipeline {
 public:
  // `own`: [rows, k], contiguous, the same shape on all ranks. Starts all transfers. `into`:
  // destination of the rows of all ranks in rank order, [size * rows, k]. Without it only other
  // ranks' rows are kept, until this object is destroyed.
  GatherPipeline(TorchComm& comm, const at::Tensor& own, const std::optional<at::Tensor>& into);

  size_t steps() const { return schedule_.steps.size(); }
  int chunk(size_t step) const { return schedule_.steps[step].first; }
  // Returns the rows of chunk(step), valid on the current stream.
  at::Tensor wait(size_t step);
  // Makes all of `into` valid on the current stream.
  void wait_all();

 private:
  GatherSchedule schedule_;
  at::Tensor own_;
  at::Tensor buffer_;  // [size, rows, k]
  std::vector<WorkPtr> works_;
};

// Partial products that are sent to the ranks that sum them, in the order of scatter_schedule().
class ScatterPipeline {
 public:
  ScatterPipeline(TorchComm& comm, int64_t rows, int64_t columns, const at::TensorOptions& options);

  size_t steps() const { return schedule_.steps.size(); }
  int chunk(size_t step) const { return schedule_.steps[step].first; }
  bool is_own(size_t step) const { return step + 1 == steps(); }
  // Returns the uninitialized memory for the partial product of chunk(step): [rows, columns].
  at::Tensor partial(size_t step);
  // Starts the transfer of the partial product of `step`. No-op for this rank's chunk.
  void send(size_t step);
  // Sets `out` [rows, columns] to the sum, or mean, of all ranks' partial products of this rank's
  // rows, in rank order. 8- and 16-bit floats accumulate in fp32 and are rounded once.
  void reduce(const at::Tensor& out, bool mean);

 private:
  void wait(size_t step);

  TorchComm& comm_;
  ScatterSchedule schedule_;
  at::Tensor send_buffer_;     // [size - 1, rows, columns], by step
  at::Tensor receive_buffer_;  // [size, rows, columns], by source rank
  std::vector<WorkPtr> works_;
};

// out = x w^T + bias, all 2-D; `out` may be rows of a larger tensor. Floats on GPUs run on the GEMM
// layer, with its tuning; all others on torch. overlaps_communication: see GemmArgs.
void linear_out(std::string_view op, const at::Tensor& out, const at::Tensor& x,
                const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                bool overlaps_communication = false);

// Returns `x` as [rows, features]: all dimensions but the last are flattened.
at::Tensor as_rows(const at::Tensor& x);
// Returns `x` as [rows, features]: dimension `dim` first, then all dimensions but the last are
// flattened.
at::Tensor to_rows(const at::Tensor& x, int64_t dim);
// The inverse. writable_rows() returns memory for the rows of a contiguous result: the result
// itself if its rows are in order, otherwise a temporary from which copy_rows_back() copies them.
at::Tensor writable_rows(const at::Tensor& out, int64_t dim);
void copy_rows_back(const at::Tensor& rows, const at::Tensor& out, int64_t dim);

}  // namespace torch_overlap::ops
