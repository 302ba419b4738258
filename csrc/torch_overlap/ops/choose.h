#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/overlap/fused.h"

// Selection of the algorithm of a fused operator.
namespace torch_overlap::ops {

enum class Algorithm { sequential, pipelined, p2p, bulk, fused, low_latency };
TORCH_OVERLAP_API std::string_view to_string(Algorithm algorithm);
// Returns every algorithm name except "auto".
TORCH_OVERLAP_API std::vector<std::string> algorithm_names();
// Throws a kValue error that lists the choices if `algorithm` is unknown.
void check_algorithm(std::string_view op, std::string_view algorithm);

// The properties of a call on which the choice depends.
struct OverlapProblem {
  std::string_view op;   // has static storage duration
  at::ScalarType dtype;  // dtype that is sent or summed; for 8-bit operators, the result's
  // Product [m, k] x [k, n] of the whole layer: all ranks' rows and features. 0: no measurements
  // exist.
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t chunk_rows = 0;  // rows of one rank's chunk, or of a piece
  // Capacity in bytes that the channels must have. 0: the channel is not used.
  int64_t gather_bytes = 0;
  int64_t scatter_bytes = 0;
  // This rank's products, if the operator has fused kernels: the columns of each, and k. 0: it has
  // none. local_m: rows of one kernel; 0: one chunk of each rank. types: set if they are not all
  // `dtype`.
  c10::SmallVector<int64_t, 4> local_n{};
  int64_t local_k = 0;
  int64_t local_m = 0;
  std::optional<FusedTypes> types = std::nullopt;
  // Capacity in bytes that "low_latency" needs of the channel of sums. 0: it uses the gather
  // channel. Empty: the operator has no such algorithm.
  std::optional<int64_t> low_latency_bytes = std::nullopt;
  // True if every rank gets the sum. For few rows the device may then have one kernel that
  // multiplies and sums (OverlapDevice::required_fused_allreduce_bytes()). "fused" is that kernel
  // then, over a channel of its own.
  bool is_all_reduce = false;
  // True if "auto" prefers channels when nothing was measured.
  bool prefers_channels = true;
  // False if nothing sums or multiplies this dtype in pieces.
  bool can_pipeline = true;

  bool operator==(const OverlapProblem&) const = default;

  // True if the fused kernel may wait for data that copies deliver.
  bool fused_kernel_waits_for_copies() const { return gather_bytes > 0 && scatter_bytes == 0; }
};

struct Choice {
  Algorithm algorithm;
  std::string why;
  // Source of the choice: "caller", "table" (shipped), "cache" (of `python -m torch_overlap tune`),
  // or "rule".
  std::string_view decided_by;
};

// While it lives, choose_algorithm() on this thread explains the choice, without communication, and
// the operators compute nothing; their operands may be Meta tensors. Assumes, where it is not known
// yet, that the ranks map each other's memory and have one GPU each (ranks exchange their devices
// only when they share memory), and that every rank has this rank's cache.
class TORCH_OVERLAP_API ExplainScope {
 public:
  ExplainScope();
  ~ExplainScope();
  ExplainScope(const ExplainScope&) = delete;
  ExplainScope& operator=(const ExplainScope&) = delete;
  static ExplainScope* current();
  // Empty: no operator has chosen.
  std::optional<Choice> choice;

 private:
  ExplainScope* const outer_;
};

// True if a kernel is called for the shape and dtype of its results alone: on Meta tensors, unless
// they stand for real ones in explain.
bool is_shape_only(const at::Tensor& x);

// Returns the requested `algorithm`, or the one that "auto" selects: from the table, otherwise from
// the cache, otherwise from the nearest measured sizes in either, otherwise by a rule on the number
// of rows and the ranks' capabilities. The result is the same on all ranks. The call is collective
// if it uses channels that do not exist yet, or if the ranks have not exchanged their caches.
// Throws kUnsupported if the requested algorithm cannot run. The communicator caches the result
// until set_tuning() or until the capabilities of its channels change. `check`, if set, is called
// before anything is sent; its exceptions propagate. Empty in an ExplainScope: the operator returns
// without computing.
TORCH_OVERLAP_API std::optional<Algorithm> choose_algorithm(
    const OverlapProblem& problem, std::string_view algorithm,
    const std::shared_ptr<TorchComm>& comm, const std::function<void()>& check = {});
// The same for the forward pass of an operator whose gradient has "bulk": "bulk" overlaps only the
// communication of gradients.
std::optional<Algorithm> choose_forward(const OverlapProblem& problem, std::string_view algorithm,
                                        const std::shared_ptr<TorchComm>& comm);

// Returns the channel bytes of the kernel that multiplies and sums a product of few rows; 0 if
// "fused" is not that kernel.
int64_t fused_allreduce_bytes(const OverlapProblem& problem, const TorchComm& comm);

// True if the products over channels support this dtype and channels can sum it.
bool is_channel_dtype(at::ScalarType dtype);

// True if a chunk of this many rows takes longer than the launch of its transfer.
bool is_worth_chunks(int64_t rows);

}  // namespace torch_overlap::ops
