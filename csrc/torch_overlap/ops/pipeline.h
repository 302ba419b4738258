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

// The chunked executors: transfers on the communicator's stream (on CPU: in its background thread)
// while the caller's GEMMs run on the current one. Device-neutral, and safe to capture in a CUDA
// graph: they never look at the device from the host. Used by one thread, inside one operator call.
namespace torch_overlap::ops {

// A named stretch of host time in a profile, e.g. "torch_overlap::chunk_gemm[2]". Costs nothing
// when nobody profiles. A timeline shows with these that transfer i+1 is issued before GEMM i ends.
class Span {
 public:
  Span(std::string_view name, size_t index);

 private:
  at::RecordFunction record_;
};

// Rows of all ranks, gathered chunk by chunk in the order of gather_schedule(direct).
class GatherPipeline {
 public:
  // `own`: [rows, k], contiguous, the same shape on all ranks. Starts all transfers. `into`: where
  // the rows of all ranks go in rank order, [size * rows, k]; without it only those of the others
  // are kept, until this object is gone.
  GatherPipeline(TorchComm& comm, const at::Tensor& own, const std::optional<at::Tensor>& into);

  size_t steps() const { return schedule_.steps.size(); }
  int chunk(size_t step) const { return schedule_.steps[step].first; }
  // The rows of chunk(step), valid on the current stream.
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
  // Where the caller writes its partial product of chunk(step): [rows, columns], uninitialized.
  at::Tensor partial(size_t step);
  // Starts the transfer of what was written there; nothing to do for the own chunk.
  void send(size_t step);
  // `out` [rows, columns] becomes the sum of all ranks' partial products of this rank's rows, or
  // their mean. In rank order; 8- and 16-bit floats accumulate in fp32 and are rounded once.
  void reduce(const at::Tensor& out, bool mean);

 private:
  void wait(size_t step);

  TorchComm& comm_;
  ScatterSchedule schedule_;
  at::Tensor outgoing_;  // [size - 1, rows, columns], by step
  at::Tensor arriving_;  // [size, rows, columns], by the rank it comes from
  std::vector<WorkPtr> works_;
};

// out = x w^T + bias, all 2-D; `out` may be rows of a larger tensor. Floats on GPUs by the GEMM
// layer, with its tuning; the rest by torch. beside_transfers: see GemmArgs.
void linear_out(std::string_view op, const at::Tensor& out, const at::Tensor& x,
                const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                bool beside_transfers = false);

// `x` as [rows, features]: all but the last dimension flattened.
at::Tensor as_rows(const at::Tensor& x);
// `x` as [rows, features]: dimension `dim` first, then all but the last flattened.
at::Tensor to_rows(const at::Tensor& x, int64_t dim);
// The way back. rows_of() is where the rows of a contiguous result are to be written: the result
// itself where they lie in order, else other memory, from which put_rows() then copies them.
at::Tensor rows_of(const at::Tensor& out, int64_t dim);
void put_rows(const at::Tensor& rows, const at::Tensor& out, int64_t dim);

}  // namespace torch_overlap::ops
