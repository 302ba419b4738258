#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <vector>

#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/ops/chunking.h"
#include "torch_overlap/overlap/schedule.h"

// All-to-alls beside products, in pieces, as the executors of pipeline.h: transfers on the
// communicator's stream while the caller's GEMMs run on the current one.
namespace torch_overlap::ops {

// The algorithms of an operator that exchanges; throws a kValue error that lists them.
void check_exchange_algorithm(std::string_view op, std::string_view algorithm);
// Whether to go in pieces, for a product of so many rows of this rank. The same on all ranks.
bool goes_in_pieces(const TorchComm& comm, std::string_view algorithm, int64_t rows);

// all_to_all(x, 0, -1) of rows: what each rank has of this rank's rows, side by side in rank order.
class RowExchange {
 public:
  // `rows`: [size * own, k], contiguous; part r goes to rank r. Starts all transfers: this rank's
  // rows come in at most `pieces`; 0: as one collective, which the constructor waits for.
  RowExchange(TorchComm& comm, const at::Tensor& rows, int64_t pieces);

  size_t steps() const { return ranges_.size(); }
  RowRange range(size_t step) const { return ranges_[step]; }
  // The rows range(step), [length, size * k], valid on the current stream. Steps in order.
  at::Tensor wait(size_t step);
  // All of them, [own, size * k].
  at::Tensor wait_all();

 private:
  std::vector<RowRange> ranges_;
  at::Tensor received_;  // [size, own, k]
  at::Tensor joined_;    // [own, size * k]
  std::vector<WorkPtr> works_;
  size_t waited_ = 0;
};

// all_to_all(y, -1, 0) of a product y that is made part by part, by the columns that go to one
// rank: each part travels while the next is computed. In the order of scatter_schedule(). No part
// is copied.
class ColumnExchange {
 public:
  // `into`: [size * rows, columns], contiguous: becomes the result, rank r's rows behind those of
  // rank r - 1. rows: what this rank's product has.
  ColumnExchange(TorchComm& comm, const at::Tensor& into);

  size_t steps() const { return schedule_.steps.size(); }
  // Whose columns are computed in this step.
  int chunk(size_t step) const { return schedule_.steps[step].first; }
  // Where the caller writes them, [rows, columns], uninitialized.
  at::Tensor part(size_t step);
  // Starts the transfer of what was written there; nothing to do for the own part.
  void send(size_t step);
  // Makes the result valid on the current stream.
  void wait_all();

 private:
  TorchComm& comm_;
  ScatterSchedule schedule_;
  at::Tensor outgoing_;  // [size - 1, rows, columns], by step
  at::Tensor arriving_;  // [size, rows, columns], by the rank it comes from
  std::vector<WorkPtr> works_;
};

// all_to_all(y, -1, 0) of y [rows, size * columns], as one collective.
void exchange_columns(TorchComm& comm, const at::Tensor& y, const at::Tensor& into);

}  // namespace torch_overlap::ops
