#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// What is hidden behind the products.
enum class CommOverlapType : int64_t { NONE = 0, RS = 1, AG = 2 };

// How: BULK, a collective beside a product that has nothing to do with it; PIPELINE, a product in
// pieces, each reduced while the next is made; RING_EXCHANGE, chunks that go from rank to rank.
enum class CommOverlapMethod : int64_t { NONE = 0, BULK = 1, PIPELINE = 2, RING_EXCHANGE = 3 };

enum class CommOverlapAlgo : int64_t {
  NO_OVERLAP = 0,
  BULK_OVERLAP_AG = 1,
  BULK_OVERLAP_RS = 2,
  SPLIT_PIPELINED_AG_P2P = 3,
  SPLIT_PIPELINED_RS = 4,
  SPLIT_PIPELINED_RS_P2P = 5,
  ATOMIC_GEMM_RS = 6,
  ATOMIC_GEMM_AG_P2P = 7,
  ATOMIC_GEMM_RS_P2P = 8,
  EXTERNAL_BULK_OVERLAP_AG = 9,
};

TORCH_OVERLAP_API std::string_view to_string(CommOverlapType type);
TORCH_OVERLAP_API std::string_view to_string(CommOverlapMethod method);
TORCH_OVERLAP_API std::string_view to_string(CommOverlapAlgo algo);

// All that two buffers have in common if they are the same. Equal on all ranks of a group.
struct TORCH_OVERLAP_API CommOverlapConfig {
  CommOverlapType comm_type = CommOverlapType::NONE;  // NONE: either, for BULK
  CommOverlapMethod method = CommOverlapMethod::BULK;
  // [tokens, features], of all ranks: the most that a call may have.
  std::vector<int64_t> buffer_shape;
  c10::ScalarType buffer_dtype = c10::ScalarType::BFloat16;
  int tp_size = 1;  // how many ranks the group has
  // PIPELINE: pieces of a product. RING_EXCHANGE has one for each rank.
  int num_splits = 4;
  int num_max_streams = 3;  // products that run side by side, at most
  // Blocks of a cluster of communication kernels; copy engines have none.
  int comm_cga_size = 2;
  // Of streams, as CUDA counts them (less is more urgent). Both 0: products the least urgent,
  // communication the most.
  int gemm_priority = 0;
  int comm_priority = 0;
  int num_comm_sm = 16;       // blocks of communication kernels
  bool set_sm_margin = true;  // products leave num_comm_sm SMs free
  // Copy engines move what is gathered or exchanged, and no SM does.
  bool use_ce = false;
  bool atomic_gemm = false;  // for atomic_gemm_overlap_*
  bool rs_overlap_first_gemm = false;
  bool aggregate_ag = false;  // RING_EXCHANGE: products of two chunks
  // RING_EXCHANGE: chunks go round from neighbour to neighbour, for links between neighbours only;
  // else each comes straight from its owner.
  bool relay_ag = false;

  // What is usual for a method: RING_EXCHANGE takes copy engines, one SM and no margin, and as many
  // splits as ranks. Where copy engines carry all, also because of `use_ce`, clusters are of 1.
  static CommOverlapConfig defaults(CommOverlapType type, CommOverlapMethod method, int tp_size,
                                    std::optional<bool> use_ce = std::nullopt);
  // Whether copy engines move all that is communicated. Sums outside of a ring are kernels.
  bool copy_engines_carry_all() const;
  // Throws at the first thing that cannot be. `op` is for the error.
  void validate(std::string_view op) const;
  // All fields, one after another: equal texts are equal configurations.
  std::string text() const;
  bool operator==(const CommOverlapConfig&) const = default;

  int64_t numel() const;
  size_t bytes() const { return static_cast<size_t>(numel()) * c10::elementSize(buffer_dtype); }
};

}  // namespace torch_overlap
