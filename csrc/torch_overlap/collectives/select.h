#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/collectives/geometry.h"

namespace torch_overlap {

// Selects the kernel of a collective over symmetric memory, or NCCL (docs/design/kernels.md). The
// result depends only on values that are equal on every rank: operation, sizes, dtype, group,
// hardware and hints. It never depends on a pointer.

enum class CollectiveKind : uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  broadcast,
};

// Transfer of data to the other ranks, and of the notification that it arrived.
enum class Protocol : uint8_t {
  none,      // NCCL runs the collective
  ll,        // packets of 16 bytes: 12 bytes of data and the epoch
  ll128,     // lines of 128 bytes, stored by a warp: 120 bytes of data and the epoch
  simple,    // 16-byte stores, then one flag per block
  two_shot,  // all_reduce: Simple reduce-scatter, then Simple all-gather
  bulk,      // chunks by bulk copies (TMA); all_reduce of more than two ranks is two-shot
};
TORCH_OVERLAP_API std::string_view to_string(Protocol protocol);

// Selects the collectives that our kernels run instead of NCCL: none, those that are faster, or all
// that are supported. The other values force one protocol, for tests and measurements.
enum class CollectiveMode : uint8_t {
  off,
  automatic,
  always,
  ll,
  ll128,
  simple,
  two_shot,
  bulk,
  zero_copy
};
// The spelling of the hint: "auto" for automatic.
TORCH_OVERLAP_API std::string_view to_string(CollectiveMode mode);
// Throws kValue for an unknown mode. `what` names the source of the text in the message.
TORCH_OVERLAP_API CollectiveMode parse_collective_mode(std::string_view text,
                                                       std::string_view what);
inline constexpr std::string_view kCustomCollectivesHint = "custom_collectives";

// Scales of the e4m3 values to which rows are quantized after their RMSNorm.
enum class NormScaling : uint8_t {
  none,    // not quantized
  tensor,  // one scale, which the caller gives
  row,     // one scale per row, from its largest magnitude
  block  // 16-bit rows: one scale per kNormScaleBlock elements of a row, from the largest magnitude
};
inline constexpr int kNormScaleBlock = 128;

struct CollectiveProblem {
  CollectiveKind kind;
  int size;              // ranks in the group
  size_t bytes;          // all_reduce, broadcast: the tensor; others: sent from one rank to another
  size_t ll_data_bytes;  // of an LL packet: 8 for a reduction of 8-byte elements, else 12
  size_t row_bytes = 0;  // all_reduce followed by an RMSNorm: bytes of a row; else 0
  NormScaling norm_scaling = NormScaling::none;
  // False if ranks do not know each other's sizes (splits); `bytes` is then ignored.
  bool is_uniform = true;
  int max_bulk_blocks = 0;  // 0: the GPU has no bulk copies
  // A hint limits the number of blocks: bulk copies are then preferred, since they need the fewest.
  bool has_few_blocks = false;
  // A warp's 128-byte store becomes visible on every peer as a whole.
  bool has_ll128 = false;
  // The communicator has, or had, a window: the call's tensors may be in it on all ranks.
  bool has_windows = false;
};

// A chunk is one block's share of one round, in units: LL packets, LL128 units (four lines), or
// 16-byte vectors.
struct CollectivePlan {
  Protocol protocol = Protocol::none;
  int blocks = 0;
  uint32_t chunk = 0;
  // Two-shot all_reduce: each rank reduces one slice and sends it to all. Chunks are parts of
  // slices.
  bool is_two_shot = false;
  // RMSNorm in the same kernel: blocks of the cluster that holds a row, one chunk each. 0: no norm.
  int row_blocks = 0;
  // Ranks first exchange the addresses of their tensors, which are used in place if all are in one
  // window. If not, `protocol` runs.
  bool zero_copy = false;

  explicit operator bool() const { return protocol != Protocol::none; }
};
// The flight recorder's field "algorithm": the protocol, or "zero_copy".
TORCH_OVERLAP_API std::string_view to_string(const CollectivePlan& plan);

TORCH_OVERLAP_API bool is_supported_collective(CollectiveKind kind, int size);
TORCH_OVERLAP_API int max_simple_blocks(int size);
// An empty plan means NCCL.
TORCH_OVERLAP_API CollectivePlan plan_collective(const CollectiveProblem& problem,
                                                 CollectiveMode mode);

}  // namespace torch_overlap
