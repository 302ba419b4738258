#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/overlap/fused.h"
#include "torch_overlap/overlap/op_channels.h"

// The algorithms of an overlapped operator: their names, and what each of them requires.
namespace torch_overlap::ops {

enum class Algorithm { sequential, pipelined, p2p, bulk, fused, low_latency };
TORCH_OVERLAP_API std::string_view to_string(Algorithm algorithm);
// Returns every algorithm name except "auto".
TORCH_OVERLAP_API std::vector<std::string> algorithm_names();
// Returns the algorithm of a name; empty if there is none ("auto").
std::optional<Algorithm> algorithm_of(std::string_view name);
// Throws a kValue error that lists the choices if `algorithm` is unknown.
void check_algorithm(std::string_view op, std::string_view algorithm);

// A channel that an algorithm uses, with at least `bytes` of data.
struct ChannelRequirement {
  OperatorChannel which;
  int64_t bytes;
  bool operator==(const ChannelRequirement&) const = default;
};

// This rank's products, for operators that have fused kernels. There is no kernel if k is 0.
struct FusedProducts {
  c10::SmallVector<int64_t, 4> n{};  // columns of each product
  int64_t k;
  std::optional<int64_t> rows = std::nullopt;  // rows of one kernel; empty: one chunk of each rank
  FusedTypes types;
  bool operator==(const FusedProducts&) const = default;
};

// The properties of a call on which the choice of its algorithm depends.
struct OverlapProblem {
  std::string_view op;   // has static storage duration
  at::ScalarType dtype;  // dtype that is sent or summed; for 8-bit operators, the result's
  // Shape of the whole GEMM: all ranks' rows and features. Empty: no measurements exist.
  std::optional<GemmShape> global_shape = std::nullopt;
  // The name in measurements, with static storage duration. Empty: that of the operator.
  std::string_view measured_as{};
  int64_t chunk_rows = 0;  // rows of one rank's chunk, or of a piece
  // Capacity in bytes that the channels must have. Empty: the channel is not used.
  std::optional<int64_t> gather_bytes = std::nullopt;
  std::optional<int64_t> reduce_scatter_bytes = std::nullopt;
  std::optional<FusedProducts> fused = std::nullopt;  // empty: the operator has no fused kernels
  // The channel of "low_latency". Empty: the operator has no such algorithm.
  std::optional<ChannelRequirement> low_latency = std::nullopt;
  // True if every rank gets the sum: each element moves twice over channels, so "auto" prefers none
  // of them when nothing was measured. For few rows the device may have one kernel that multiplies
  // and sums (OverlapDevice::required_fused_allreduce_bytes()). "fused" is that kernel then, over a
  // channel of its own.
  bool is_all_reduce = false;
  // False if nothing sums or multiplies this dtype in pieces.
  bool can_pipeline = true;

  bool operator==(const OverlapProblem&) const = default;
  bool can_fuse() const { return fused && fused->k > 0; }
};

// True if the problem or the ranks decide whether the algorithm can run.
bool can_be_unsupported(Algorithm algorithm);
// Returns why the algorithm cannot run; empty if it can. A channel that does not exist is assumed
// to be usable, unless a capture keeps it from being created.
std::string unsupported_reason(Algorithm algorithm, const OverlapProblem& problem,
                               const TorchComm& comm);
// Creates the channels that the algorithm uses and that do not exist, up to the first one that
// cannot be used. Collective. Creates none if the algorithm cannot run anyway, or in a capture.
void ensure_channels(Algorithm algorithm, const OverlapProblem& problem,
                     const std::shared_ptr<TorchComm>& comm);
// True if ranks share a GPU, as far as existing channels know.
bool shares_devices(const OverlapProblem& problem, const TorchComm& comm);

// Returns the shape of the kernel that multiplies and sums a product of few rows.
FusedShape fused_allreduce_shape(const OverlapProblem& problem, const TorchComm& comm);
// Returns the channel bytes of that kernel, for its shape; 0 if "fused" is not that kernel.
int64_t fused_allreduce_bytes(const OverlapProblem& problem, const TorchComm& comm);
int64_t fused_allreduce_bytes(const OverlapProblem& problem, const TorchComm& comm,
                              const FusedShape& shape);

// True if the products over channels support this dtype and channels can sum it.
bool is_channel_dtype(at::ScalarType dtype);

}  // namespace torch_overlap::ops
