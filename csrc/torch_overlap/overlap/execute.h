#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/overlap/channel.h"
#include "torch_overlap/overlap/schedule.h"

// The overlapped operations: each enqueues work on the streams of a channel. Callers check the
// arguments; the checks here throw before anything is sent.
namespace torch_overlap {

// A matrix whose rows are gathered from all ranks.
struct GatheredRows {
  at::Tensor own;     // this rank's [length, columns], contiguous; may be its slice of `all`
  at::Tensor all;     // [rows, columns], contiguous; in the channel's data if ranks map it
  at::Tensor copy{};  // [rows, columns]: all rows are copied to it; undefined: not requested
};

// GEMMs of all ranks' rows.
struct GatherGemm {
  // GEMMs of all rows: out, ... have rows.rows rows; lhs.data is data.all, and lhs.scale_inv is
  // scales.all if scales are gathered.
  std::vector<GemmArgs> gemms;
  RowPartition rows;
  GatheredRows data;
  GatheredRows scales;  // block scales of lhs, one row per row of lhs; undefined: not gathered
  GatherOrder order = GatherOrder::all_pairs;
  bool single_stream = false;  // see OverlapStreams::fork()
};
// Uses flags 0 .. size - 1, with scales up to 2 * size - 1. Afterwards `all` holds all rows, except
// this rank's own in the orders `all_pairs` and `ring` if they were stored elsewhere. One GEMM per
// chunk of rows, started as soon as they have arrived.
TORCH_OVERLAP_API void run_gather_gemm(std::string_view op, OverlapChannel& channel,
                                       const GatherGemm& problem);
// The same by one kernel per GEMM, which waits for the chunks itself; the device must support all
// of `gemms`.
TORCH_OVERLAP_API void run_fused_gather(std::string_view op, OverlapChannel& channel,
                                        const GatherGemm& problem);
// The same without scales: all rows by one kernel if the device has it, then each GEMM unsplit.
TORCH_OVERLAP_API void run_low_latency_gather(std::string_view op, OverlapChannel& channel,
                                              const GatherGemm& problem);

// A GEMM whose rows are summed over ranks, each row by its owner.
struct ReduceScatterGemm {
  // GEMMs of all rows: out is `partial`. The first one writes it, the others accumulate.
  std::vector<GemmArgs> gemms;
  RowPartition rows;
  at::Tensor partial;  // [rows, columns], contiguous: destination of this rank's GEMMs
  // [size * rows.largest(), columns], contiguous, in the channel's data if ranks map it: the rows
  // of rank r arrive at row r * rows.largest().
  at::Tensor received;
  at::Tensor out;  // [length, columns] of this rank
  at::Tensor scale_inv{};
  double factor = 1;
  at::Tensor bias{};  // [columns], added once
  // True if lhs has the same number of columns on every rank.
  bool ranks_share_k = true;
  bool single_stream = false;  // see OverlapStreams::fork()
  // If set, called once, with stream 0 as the current stream, after this rank's GEMMs: its work
  // does not depend on `out` and runs while the last rows travel.
  std::function<void()> meanwhile{};
};
// Uses flags 0 .. size - 1. `partial` and `received` must not overlap.
TORCH_OVERLAP_API void run_reduce_scatter_gemm(std::string_view op, OverlapChannel& channel,
                                               const ReduceScatterGemm& problem);
// The same for one GEMM without scale_inv, which the device must support: a kernel computes this
// rank's rows and sums. The other rows are sent by the same kernel, or by copies of GEMMs of
// pieces. `meanwhile` runs after the kernel. Uses all flags of the channel.
TORCH_OVERLAP_API void run_fused_reduce_scatter(std::string_view op, OverlapChannel& channel,
                                                const ReduceScatterGemm& problem);

// A GEMM whose result is summed in place over ranks: each rank reads the sums that it needs from
// its peers.
struct ReduceGemm {
  GemmArgs gemm;  // GEMM of all rows; out is ignored
  RowPartition rows;
  bool is_all_reduce = false;  // all ranks get all rows; otherwise their own
  at::Tensor out;              // [rows, columns] or [length, columns], contiguous
  double factor = 1;
  at::Tensor bias;  // [columns] of this rank, contiguous, added once; or undefined
};
// Needs a channel that is used for nothing else, with low_latency_sum_bytes() bytes and 2 *
// kMaxLowLatencyBlocks flags per rank. Only if ranks can map each other's memory.
TORCH_OVERLAP_API void run_low_latency_sum(std::string_view op, OverlapChannel& channel,
                                           const ReduceGemm& problem);

// The same with all rows on all ranks, by one kernel of the device
// (OverlapDevice::required_fused_allreduce_bytes()), on a channel that is used for nothing else.
TORCH_OVERLAP_API void run_fused_all_reduce(std::string_view op, OverlapChannel& channel,
                                            const ReduceGemm& problem);

// An all-gather that runs concurrently with what the caller does next: the constructor starts it,
// and finish() waits for it. Uses flags 0 .. size - 1.
class TORCH_OVERLAP_API BackgroundGather {
 public:
  // Gathers `own` [length, k] to `gathered` [rows, k], which begins at the start of the channel's
  // data. `with_own`: copies this rank's rows too. `single_stream`: see OverlapStreams::fork().
  BackgroundGather(std::string_view op, OverlapChannel& channel, const RowPartition& rows,
                   const at::Tensor& own, const at::Tensor& gathered, bool with_own,
                   bool single_stream);
  // After it, `gathered` is valid on the caller's stream.
  void finish();

 private:
  std::optional<OverlapChannel::Operation> operation_;
  std::vector<int> flags_;
};

// A GEMM in pieces of its columns, each of which is summed over ranks while the next is computed.
struct SplitGemm {
  GemmArgs gemm;  // GEMM of all rows and columns; out is ignored
  RowPartition rows;
  int64_t columns = 0;
  // Type of the partial products, which are stored piece by piece from the start of the channel's
  // data.
  at::ScalarType dtype = at::kFloat;
  int splits = 1;
  bool overlap_first_gemm = false;
  at::Tensor out;  // [length, columns] of this rank
  at::Tensor scale_inv;
  at::Tensor bias;  // [columns], added once
  int blocks = 0;
  int cluster = 1;
};
// Uses flags 0 .. (splits + 1) * size - 1. Returns the number of pieces, which is less than
// `splits` if there are too few columns, or too few tiles of weight scales.
TORCH_OVERLAP_API int run_split_gemm(std::string_view op, OverlapChannel& channel,
                                     const SplitGemm& problem);

// A collective of the [rows, columns] at the start of the channel's data, concurrent with GEMMs
// that do not depend on it.
struct BulkGemm {
  std::vector<GemmArgs> gemms{};  // may be empty
  RowPartition rows;
  int64_t columns = 0;
  at::ScalarType dtype = at::kFloat;
  bool gathers = true;     // all-gather of the rows; otherwise their reduce-scatter
  at::Tensor out{};        // reduce-scatter: [length, columns]; may be this rank's rows themselves
  at::Tensor scale_inv{};  // reduce-scatter
  int blocks = 0;
  int cluster = 1;
  OverlapChannel* lender = nullptr;  // channel whose streams are used; null: the channel's own
};
// Uses flags 0 .. 2 * size - 1.
TORCH_OVERLAP_API void run_bulk_gemm(std::string_view op, OverlapChannel& channel,
                                     const BulkGemm& problem);

}  // namespace torch_overlap
