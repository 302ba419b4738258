#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>
#include <vector>

#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/ops/choose.h"
#include "torch_overlap/ops/chunking.h"
#include "torch_overlap/overlap/schedule.h"

// All-to-alls beside products, in pieces: transfers go on while the caller's GEMMs run on the
// current stream, between what communicators or channels do. Used by one thread, inside one
// operator call. Dropped half way, after an error, over a channel: that is of no more use.
namespace torch_overlap::ops {

// So many pieces of this rank's rows, or fewer, where each is multiplied while the next travels.
inline constexpr int64_t kRowPieces = 4;

// The algorithms of an operator that exchanges; throws a kValue error that lists them.
void check_exchange_algorithm(std::string_view op, std::string_view algorithm);
// How it goes: sequential, chunked (pieces, by the communicator) or ring (pieces, over channels).
// `problem`: its sizes; what channels need. The same on all ranks.
Algorithm choose_exchange(const OverlapProblem& problem, std::string_view algorithm,
                          const std::shared_ptr<TorchComm>& comm);

// all_to_all(x, 0, -1) of the rows of several matrices: what each rank has of this rank's rows,
// side by side in rank order, and the matrices side by side.
class RowExchange {
 public:
  // `matrices`: [size * own, k_i] each, contiguous and of one dtype; part r of the rows goes to
  // rank r. Starts all transfers, in at most so many pieces (up to kRowPieces).
  static std::unique_ptr<RowExchange> start(std::string_view op,
                                            const std::shared_ptr<TorchComm>& comm,
                                            const std::vector<at::Tensor>& matrices, int64_t pieces,
                                            Algorithm algorithm);
  // Bytes of the gather channel that `ring` needs; 0 for no matrices alone.
  static int64_t channel_bytes(const std::vector<at::Tensor>& matrices);

  virtual ~RowExchange() = default;
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  size_t steps() const { return ranges_.size(); }
  RowRange range(size_t step) const { return ranges_[step]; }
  // The rows range(step), [length, size * sum of k_i], valid on the current stream. Steps in order.
  at::Tensor wait(size_t step);
  // All of them.
  at::Tensor wait_all();
  // Of such rows, the columns of matrix i.
  at::Tensor columns(const at::Tensor& rows, size_t i) const;
  // What reads these rows has been issued.
  virtual void finish() {}

 protected:
  RowExchange(const TorchComm& comm, const std::vector<at::Tensor>& matrices, int64_t pieces);
  // Makes the rows of `step` valid in joined_.
  virtual void arrive(size_t step) = 0;
  // Where those of matrix i from rank `from` come, and those for rank `to` are.
  at::Tensor place(size_t i, int from, const RowRange& rows) const;
  at::Tensor part(size_t i, int to, const RowRange& rows) const;
  int64_t own() const { return matrices_[0].size(0) / size_; }

  const int rank_;
  const int size_;
  std::vector<at::Tensor> matrices_;
  std::vector<RowRange> ranges_;
  std::vector<int64_t> begins_;  // the first column of each matrix
  int64_t total_ = 0;            // columns
  at::Tensor joined_;            // [own, total_]: where the derived class has it

 private:
  size_t waited_ = 0;
};

// all_to_all(y, -1, 0) of products y_i that are made part by part, by the columns that go to one
// rank: each part travels while the next is computed. In the order of scatter_schedule().
class ColumnExchange {
 public:
  // into[i]: [size * rows, columns_i], contiguous: becomes the result, rank r's rows behind those
  // of rank r - 1. rows: what this rank's product has. `ring`, or the communicator's way.
  static std::unique_ptr<ColumnExchange> start(std::string_view op,
                                               const std::shared_ptr<TorchComm>& comm,
                                               const std::vector<at::Tensor>& into,
                                               Algorithm algorithm);
  // Bytes of the scatter channel that `ring` needs, for results of so many bytes each; never 0.
  static TORCH_OVERLAP_API int64_t channel_bytes(const std::vector<int64_t>& bytes);

  virtual ~ColumnExchange() = default;
  ColumnExchange(const ColumnExchange&) = delete;
  ColumnExchange& operator=(const ColumnExchange&) = delete;

  size_t steps() const { return schedule_.steps.size(); }
  // Whose columns are computed in this step.
  int chunk(size_t step) const { return schedule_.steps[step].first; }
  // Where the caller writes those of product i, [rows, columns_i], uninitialized.
  at::Tensor part(size_t i, size_t step) const;
  // Starts the transfer of what was written there; nothing to do for the own part.
  void send(size_t i, size_t step);
  // Makes the results valid on the current stream.
  virtual void wait_all() = 0;

 protected:
  ColumnExchange(const TorchComm& comm, const std::vector<at::Tensor>& into);
  virtual void transfer(size_t i, size_t step, const Exchange& exchange) = 0;

  const int rank_;
  const ScatterSchedule schedule_;
  std::vector<at::Tensor> results_;   // [size, rows, columns_i], by the rank it comes from
  std::vector<at::Tensor> outgoing_;  // [size - 1, rows, columns_i], by step
};

// all_to_all(y, -1, 0) of y [rows, size * columns], as one collective.
void exchange_columns(TorchComm& comm, const at::Tensor& y, const at::Tensor& into);

}  // namespace torch_overlap::ops
