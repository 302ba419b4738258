#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/overlap/channel.h"
#include "torch_overlap/overlap/schedule.h"

// The overlapped operations, as what they put on the lanes of a channel. Arguments are checked by
// who calls; what is checked here throws before anything is sent.
namespace torch_overlap {

// A matrix whose rows the ranks gather.
struct GatheredRows {
  at::Tensor own;   // this rank's [length, columns], contiguous; may be its place in `all`
  at::Tensor all;   // [rows, columns], contiguous, in the channel's data
  at::Tensor copy;  // [rows, columns]: becomes all rows; undefined: not asked for
};

// Products of all ranks' rows, each begun as soon as its rows have arrived.
struct GatherGemm {
  // Of all rows: out, ... have rows.rows rows; lhs.data is data.all, and lhs.scale_inv scales.all
  // where there is one.
  std::vector<GemmArgs> gemms;
  RowShare rows;
  GatheredRows data;
  GatheredRows scales;  // of blocks of lhs, a row for each of its; undefined: none are gathered
  GatherOrder order = GatherOrder::direct;
  // One kernel a product, which waits for the chunks itself; the device takes all of `gemms`.
  bool fused = false;
  bool as_one = false;  // see Lanes::fork()
  // All rows first, pushed by one kernel where the device has it; then each product as one. Without
  // scales.
  bool direct = false;
};
// Uses flags 0 .. size - 1, with scales to 2 * size - 1. Afterwards `all` holds all rows but, in
// orders `direct` and `ring`, this rank's own if they were elsewhere.
TORCH_OVERLAP_API void run_gather_gemm(std::string_view op, OverlapChannel& channel,
                                       const GatherGemm& problem);

// A product whose rows are summed over ranks, each by its owner.
struct ScatterGemm {
  // Of all rows: out is `partial`. The first writes, those behind it accumulate.
  std::vector<GemmArgs> gemms;
  RowShare rows;
  at::Tensor partial;  // [rows, columns], contiguous: where this rank's products go
  int64_t at = 0;      // byte of the channel's data: room for size x rows.largest() rows
  at::Tensor out;      // [length, columns] of this rank
  at::Tensor scale_inv;
  double factor = 1;
  at::Tensor bias;  // [columns], added once
  // Every rank's product has as many columns of lhs.
  bool ranks_share_k = true;
  // A kernel sums, and computes the own rows; that, or copies of products of pieces, sends the
  // others. One product without scale_inv, which the device takes.
  bool fused = false;
  bool as_one = false;  // see Lanes::fork()
};
// Uses flags 0 .. size - 1; fused, all that there are. `partial` and what `at` points to do not
// overlap.
TORCH_OVERLAP_API void run_scatter_gemm(std::string_view op, OverlapChannel& channel,
                                        const ScatterGemm& problem);

// A product that is summed over ranks where it lies, by whoever wants the sums.
struct DirectGemm {
  GemmArgs gemm;  // of all rows; out is not looked at
  RowShare rows;
  bool everywhere = false;  // all ranks get all rows; else their own
  at::Tensor out;           // [rows, columns] or [length, columns], contiguous
  double factor = 1;
  at::Tensor bias;  // [columns] of this rank, contiguous, added once; or undefined
};
// On a channel of these alone, with room of direct_sum_room() and 2 * kDirectBlocks flags for each
// rank. Only where ranks reach each other's memory.
TORCH_OVERLAP_API void run_direct_sum(std::string_view op, OverlapChannel& channel,
                                      const DirectGemm& problem);

// The same for all ranks, by one kernel of the device (OverlapDevice::reduce_room()), on a channel
// of these alone.
TORCH_OVERLAP_API void run_fused_reduce(std::string_view op, OverlapChannel& channel,
                                        const DirectGemm& problem);

// An all-gather that goes on beside what the caller does next: started by the constructor, and
// there after finish(). Uses flags 0 .. size - 1.
class TORCH_OVERLAP_API BackgroundGather {
 public:
  // `own` [length, k] to `gathered` [rows, k], where the channel's data begins; `with_own`: also
  // on this rank. `as_one`: see Lanes::fork().
  BackgroundGather(std::string_view op, OverlapChannel& channel, const RowShare& rows,
                   const at::Tensor& own, const at::Tensor& gathered, bool with_own, bool as_one);
  // `gathered` is valid on the caller's stream.
  void finish();

 private:
  std::optional<OverlapChannel::Operation> operation_;
  std::vector<int> flags_;
};

// A product in pieces of its columns or rows, each of which is summed over ranks while the next is
// made.
struct PipelinedGemm {
  GemmArgs gemm;  // of all rows and columns; out is not looked at
  RowShare rows;
  int64_t columns = 0;
  // Of the partial products, which go where the channel's data begins, piece by piece.
  at::ScalarType dtype = at::kFloat;
  int splits = 1;
  bool overlap_first_gemm = false;
  at::Tensor out;  // [length, columns] of this rank
  at::Tensor scale_inv;
  at::Tensor bias;  // [columns], added once
  int blocks = 0;
  int cluster = 1;
};
// Uses flags 0 .. (splits + 1) * size - 1. Returns the number of pieces: fewer than `splits` where
// the columns, or the tiles that scales of the weight lie in, do not give as many.
TORCH_OVERLAP_API int run_pipelined_gemm(std::string_view op, OverlapChannel& channel,
                                         const PipelinedGemm& problem);

// A collective of the [rows, columns] where the channel's data begins, beside products that have
// nothing to do with it.
struct BulkGemm {
  std::vector<GemmArgs> gemms;  // may be none
  RowShare rows;
  int64_t columns = 0;
  at::ScalarType dtype = at::kFloat;
  bool gathers = true;   // all-gather of the rows; else their reduce-scatter
  at::Tensor out;        // reduce-scatter: [length, columns]; may be the own rows themselves
  at::Tensor scale_inv;  // reduce-scatter
  int blocks = 0;
  int cluster = 1;
  OverlapChannel* lender = nullptr;  // whose lanes to use; null: the channel's own
};
// Uses flags 0 .. 2 * size - 1.
TORCH_OVERLAP_API void run_bulk_gemm(std::string_view op, OverlapChannel& channel,
                                     const BulkGemm& problem);

}  // namespace torch_overlap
