#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>
#include <vector>

#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/ops/choose.h"
#include "torch_overlap/ops/chunking.h"
#include "torch_overlap/overlap/schedule.h"

// All-to-alls in pieces, overlapped with products: transfers run while the caller's GEMMs run on
// the current stream. An exchange is used by one thread, inside one operator call. A channel is
// unusable after an exchange over it is destroyed before its end, after an error.
namespace torch_overlap::ops {

// Maximum number of pieces of this rank's rows; each is multiplied while the next one travels.
inline constexpr int64_t kNumRowPieces = 4;

// Checks `algorithm` for an operator that exchanges. Throws a kValue error that lists the choices.
void check_exchange_algorithm(std::string_view op, std::string_view algorithm);
// Returns sequential, pipelined (in pieces, by the communicator) or p2p (in pieces, over channels).
// `problem`: the sizes and the capacity that channels need. The result is the same on all ranks.
// Empty in an ExplainScope.
std::optional<Algorithm> choose_exchange(const OverlapProblem& problem, std::string_view algorithm,
                                         const std::shared_ptr<TorchComm>& comm);

// all_to_all(x, 0, -1) of the rows of several matrices: every rank's columns of this rank's rows,
// side by side in rank order, and the matrices side by side.
class RowExchange {
 public:
  // `matrices`: [size * own, k_i] each, contiguous, of one dtype. Part r of the rows goes to rank
  // r. Starts all transfers, in at most `pieces` pieces (up to kNumRowPieces).
  static std::unique_ptr<RowExchange> start(std::string_view op,
                                            const std::shared_ptr<TorchComm>& comm,
                                            const std::vector<at::Tensor>& matrices, int64_t pieces,
                                            Algorithm algorithm);
  // Returns the bytes of the gather channel that `p2p` needs; 0 only if there are no matrices.
  static int64_t channel_bytes(const std::vector<at::Tensor>& matrices);

  virtual ~RowExchange() = default;
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  size_t steps() const { return ranges_.size(); }
  IndexRange range(size_t step) const { return ranges_[step]; }
  // Returns the rows range(step), [length, size * sum of k_i], valid on the current stream. Must be
  // called with the steps in order.
  at::Tensor wait(size_t step);
  // Returns all rows.
  at::Tensor wait_all();
  // Returns the columns of matrix i in `rows`.
  at::Tensor columns(const at::Tensor& rows, size_t i) const;
  // Must be called once every kernel that reads these rows has been launched.
  virtual void finish() {}

 protected:
  RowExchange(const TorchComm& comm, const std::vector<at::Tensor>& matrices, int64_t pieces);
  // Makes the rows of `step` valid in gathered_.
  virtual void receive_step(size_t step) = 0;
  // Views of where the rows of matrix i from rank `from` arrive, and of the rows for rank `to`.
  at::Tensor destination(size_t i, int from, const IndexRange& rows) const;
  at::Tensor part(size_t i, int to, const IndexRange& rows) const;
  int64_t own() const { return matrices_[0].size(0) / size_; }

  const int rank_;
  const int size_;
  std::vector<at::Tensor> matrices_;
  std::vector<IndexRange> ranges_;
  std::vector<int64_t> column_offsets_;  // the first column of each matrix
  int64_t total_ = 0;                    // number of columns
  at::Tensor gathered_;                  // [own, total_]; allocated by the derived class

 private:
  size_t waited_ = 0;
};

// all_to_all(y, -1, 0) of products y_i that are computed in parts: the columns for one rank at a
// time. Each part travels while the next one is computed, in the order of
// reduce_scatter_schedule().
class ColumnExchange {
 public:
  // into[i]: [size * rows, columns_i], contiguous. Becomes the result, in rank order. rows: number
  // of rows of this rank's product. `algorithm`: p2p runs over channels, any other through the
  // communicator.
  static std::unique_ptr<ColumnExchange> start(std::string_view op,
                                               const std::shared_ptr<TorchComm>& comm,
                                               const std::vector<at::Tensor>& into,
                                               Algorithm algorithm);
  // Returns the bytes of the reduce-scatter channel that `p2p` needs for results of `bytes` each;
  // never 0.
  static TORCH_OVERLAP_API int64_t channel_bytes(const std::vector<int64_t>& bytes);

  virtual ~ColumnExchange() = default;
  ColumnExchange(const ColumnExchange&) = delete;
  ColumnExchange& operator=(const ColumnExchange&) = delete;

  size_t steps() const { return schedule_.steps.size(); }
  // Returns the rank whose columns are computed in this step.
  int chunk(size_t step) const { return schedule_.steps[step].first; }
  // Returns the uninitialized memory for that rank's columns of product i, [rows, columns_i].
  at::Tensor part(size_t i, size_t step) const;
  // Starts the transfer of the columns that were written to part(i, step). No-op for this rank's
  // part.
  void send(size_t i, size_t step);
  // Makes the results valid on the current stream.
  virtual void wait_all() = 0;

 protected:
  ColumnExchange(const TorchComm& comm, const std::vector<at::Tensor>& into);
  virtual void transfer(size_t i, size_t step, const Exchange& exchange) = 0;

  const int rank_;
  const ReduceScatterSchedule schedule_;
  std::vector<at::Tensor> results_;       // [size, rows, columns_i], by source rank
  std::vector<at::Tensor> send_buffers_;  // [size - 1, rows, columns_i], by step
};

// Exchanges over the operators' channels (exchange_channel.cpp): rows are written directly to their
// place among those of other ranks, and columns travel without the communicator's kernels.
std::unique_ptr<RowExchange> start_channel_rows(std::string_view op,
                                                const std::shared_ptr<TorchComm>& comm,
                                                const std::vector<at::Tensor>& matrices,
                                                int64_t pieces);
std::unique_ptr<ColumnExchange> start_channel_columns(std::string_view op,
                                                      const std::shared_ptr<TorchComm>& comm,
                                                      const std::vector<at::Tensor>& into);

// Runs all_to_all(y, -1, 0) of y [rows, size * columns] as one collective.
void all_to_all_columns(TorchComm& comm, const at::Tensor& y, const at::Tensor& into);

}  // namespace torch_overlap::ops
