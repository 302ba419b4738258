#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Collective that is overlapped with GEMMs.
enum class CommOverlapType : int64_t { NONE = 0, RS = 1, AG = 2 };

// Method of the overlap: BULK, a collective that runs concurrently with a GEMM which does not
// depend on it; PIPELINE, a GEMM in pieces, each reduced while the next is computed; RING_EXCHANGE,
// point-to-point exchange of chunks.
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

// Complete configuration of a buffer. Equal on all ranks of a group. Two buffers of the same
// communicator are the same if their configurations are equal.
struct TORCH_OVERLAP_API CommOverlapConfig {
  CommOverlapType comm_type = CommOverlapType::NONE;  // NONE: either, for BULK
  CommOverlapMethod method = CommOverlapMethod::BULK;
  // [tokens, features] of all ranks: the maximum that a call may have.
  std::vector<int64_t> buffer_shape;
  c10::ScalarType buffer_dtype = c10::ScalarType::BFloat16;
  int tp_size = 1;  // number of ranks of the group
  // PIPELINE: number of pieces of a GEMM. RING_EXCHANGE always has one per rank.
  int num_splits = 4;
  int num_max_streams = 3;  // maximum number of GEMMs that run concurrently
  // Blocks per cluster of communication kernels; 1 if only copy engines are used.
  int comm_cga_size = 2;
  // CUDA stream priorities (lower is more urgent). Both 0: lowest for GEMMs, highest for
  // communication.
  int gemm_priority = 0;
  int comm_priority = 0;
  int num_comm_sm = 16;       // blocks of communication kernels
  bool set_sm_margin = true;  // GEMMs leave num_comm_sm SMs free
  // Copy engines move what is gathered or exchanged, and no SM does.
  bool use_ce = false;
  bool atomic_gemm = false;  // for atomic_gemm_overlap_*
  bool rs_overlap_first_gemm = false;
  bool aggregate_ag = false;  // RING_EXCHANGE: one GEMM per two chunks
  // RING_EXCHANGE: chunks are forwarded from neighbour to neighbour, for topologies with links
  // between neighbours only; otherwise each is sent by its owner.
  bool relay_ag = false;

  // Returns the defaults of a method. RING_EXCHANGE uses copy engines, one SM, no margin, and as
  // many splits as there are ranks. If copy engines move all data, also because of `use_ce`, the
  // cluster size is 1.
  static CommOverlapConfig defaults(CommOverlapType type, CommOverlapMethod method, int tp_size,
                                    std::optional<bool> use_ce = std::nullopt);
  // True if copy engines move everything that is communicated. Sums outside of RING_EXCHANGE are
  // kernels.
  bool uses_only_copy_engines() const;
  // Throws at the first invalid field. `op` is for the error.
  void validate(std::string_view op) const;
  // Returns all fields as text: equal texts are equal configurations.
  std::string text() const;
  bool operator==(const CommOverlapConfig&) const = default;

  int64_t numel() const;
  size_t bytes() const { return static_cast<size_t>(numel()) * c10::elementSize(buffer_dtype); }
};

}  // namespace torch_overlap
