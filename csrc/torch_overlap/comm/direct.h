#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/call.h"
#include "torch_overlap/comm/direct_geometry.h"

namespace torch_overlap {

// Which collectives a communicator on NCCL does with kernels of our own, over memory that the ranks
// map from each other (docs/kernels.md). All of it is a function of what every rank knows alike:
// operation, sizes, dtype, group, hints, and whether it captures. Never of a pointer.

// One exchange: how bytes get to the other ranks, and how a rank learns that they are there.
enum class DirectProtocol : uint8_t {
  none,      // NCCL does it
  ll,        // lines of 12 bytes that carry their own epoch
  ll128,     // lines of 120 bytes that do, of a warp
  push,      // 16-byte stores, then a flag for each block
  two_shot,  // all_reduce as push of slices to their owners, and of their sums to all
  bulk,      // chunks by bulk copies; an all_reduce of more than two ranks by two shots
};
TORCH_OVERLAP_API std::string_view to_string(DirectProtocol protocol);
struct DirectPlan;
// As the flight recorder has it: the protocol, or that there may be no copies.
TORCH_OVERLAP_API std::string_view to_string(const DirectPlan& plan);

struct DirectProblem {
  Primitive primitive;
  int size;      // of the group
  size_t bytes;  // all_reduce, broadcast: of the tensor; else: what goes from one rank to another
  size_t line_data;      // 8 for a reduction of elements of 8 bytes, else 12
  size_t row_bytes = 0;  // an all_reduce with an RMSNorm behind it: of a row; else 0
  // Every rank knows `bytes`. Else, as with splits, `bytes` says nothing and may be anything.
  bool is_uniform = true;
  int most_bulk_blocks = 0;  // 0: the GPUs have no bulk copies
  // These are few because the communicator was told to leave SMs to others: then bulk copies come
  // before what takes more.
  bool has_few_blocks = false;
  // A store of 128 bytes by a warp gets to every other rank, and is seen there, as a whole.
  bool has_ll128 = false;
  // The communicator has, or has had, a window: the call's tensors may lie in it, on all ranks.
  bool has_windows = false;
};

// `chunk` units of data (lines of 12 bytes, four lines of 120, or vectors of 16 bytes) are one
// block's part of one round.
struct DirectPlan {
  DirectProtocol protocol = DirectProtocol::none;
  int blocks = 0;
  uint32_t chunk = 0;
  // An all_reduce as a slice of the message for each rank, which adds it up and sends it to all.
  // Chunks are of slices.
  bool has_slices = false;
  // An RMSNorm in the same kernel: so many blocks, a cluster, have a row, a chunk each. 0: none is.
  int row_blocks = 0;
  // The kernel begins with the ranks telling each other where their tensors lie. If all are in one
  // window they are read and written where they are; else `protocol` does it.
  bool zero_copy = false;

  explicit operator bool() const { return protocol != DirectProtocol::none; }
};

inline constexpr std::string_view kDirectHint = "direct_collectives";
// As the hint spells it.
TORCH_OVERLAP_API std::string_view to_string(DirectMode mode);

// Whether a group of this size and this operation can be done directly at all.
TORCH_OVERLAP_API bool is_direct_possible(Primitive primitive, int size);
// Of a kernel that pushes, in a group of `size`.
TORCH_OVERLAP_API int most_push_blocks(int size);
TORCH_OVERLAP_API DirectPlan plan_direct(const DirectProblem& problem, DirectMode mode);

}  // namespace torch_overlap
