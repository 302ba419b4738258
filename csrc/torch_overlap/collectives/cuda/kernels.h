#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "torch_overlap/collectives/geometry.h"
#include "torch_overlap/collectives/select.h"
#include "torch_overlap/symm/cuda/wait_record.h"

// Collective kernels over peer-mapped memory: docs/design/kernels.md.
namespace torch_overlap::cuda {

// Memory of one channel on every rank: the same layout, from `base` on. Two kernels of one channel
// never run concurrently on a rank.
//
//   epochs     per block and peer: number of rounds that both have completed
//   busy       per block: set while a kernel runs
//   late       one word: set once the running kernel has reported a late rank to the host
//   flags      two lines per block and source: epoch of the last round whose data has arrived.
//              First word: Simple (two-shot: slices in one line, sums in the other). Next two words
//              of the first line: bulk copies (parts, sums)
//   locations  per block, slot and source: an LL packet with the location of a rank's tensor
//   LL         per block, slot and source: packets of 16 bytes
//   LL128      the same, lines of 128 bytes: parts and, for more than two ranks, sums
//   Simple     the same, vectors
//   bulk       the same, for bulk copies: parts and, for more than two ranks, sums
struct CollectiveLayout {
  using G = CollectiveGeometry;
  static constexpr size_t kEpochs = 0;
  static constexpr size_t kBusy = kEpochs + G::kMaxBlocks * G::kMaxRanks * sizeof(uint32_t);
  static constexpr size_t kLateReported = kBusy + G::kMaxBlocks * sizeof(uint32_t);
  static constexpr size_t kFlags = 16384;
  static constexpr size_t kFlagBytesPerKind = G::kMaxBlocks * G::kMaxRanks * G::kFlagBytes;
  static constexpr size_t kLocations = kFlags + 2 * kFlagBytesPerKind;
  static constexpr size_t kLocationBytesPerBlock = G::kLLSlots * G::kMaxRanks * G::kLLPacketBytes;
  static constexpr size_t kLL = kLocations + G::kMaxBlocks * kLocationBytesPerBlock;
  static_assert(kLateReported + sizeof(uint32_t) <= kFlags);

  static constexpr size_t ll_bytes_per_rank() { return size_t{G::kLLPackets} * G::kLLPacketBytes; }
  static constexpr size_t simple_bytes_per_rank() { return size_t{G::kVectors} * G::kVectorBytes; }
  static constexpr size_t ll128_bytes_per_rank() {
    return size_t{G::kLL128Units} * G::kLL128UnitBytes;
  }
  static constexpr size_t ll128(int size) {
    return kLL + size_t(G::max_ll_blocks(size)) * G::kLLSlots * size * ll_bytes_per_rank();
  }
  static constexpr size_t simple(int size) {
    return ll128(size) + size_t(G::max_ll128_blocks(size)) * G::kLL128Slots * G::ll128_kinds(size) *
                             size * ll128_bytes_per_rank();
  }
  static constexpr size_t bulk(int size, int max_blocks) {
    return simple(size) + size_t{G::kSimpleSlots} * max_blocks * size * simple_bytes_per_rank();
  }
  static constexpr size_t bytes(int size, int max_blocks) {
    return bulk(size, max_blocks) + size_t{G::kBulkSlots} * G::max_bulk_blocks(size) *
                                        G::bulk_kinds(size) * (size - 1) * G::bulk_bytes(size);
  }
};

enum class ReductionOp : uint32_t { sum, average, product, min, max };
enum class ReductionType : uint32_t { i32, i64, f16, bf16, f32, f64 };

struct CollectiveParams {
  char*
      base[CollectiveGeometry::kMaxRanks];  // address of the channel on each rank, in this process
  // Source of the data for each rank, and destination of the data from each rank. In a reduction
  // every part has send_bytes[0] bytes, send[rank] is this rank's own contribution, and recv[0] is
  // the result. In a two-shot LL128 kernel the parts are slices, of which the last ones may be
  // shorter.
  const char* send[CollectiveGeometry::kMaxRanks];
  char* recv[CollectiveGeometry::kMaxRanks];
  uint64_t send_bytes[CollectiveGeometry::kMaxRanks];
  uint64_t recv_bytes[CollectiveGeometry::kMaxRanks];
  // Two-shot by Simple or bulk copies: bytes of every slice except the last ones.
  uint64_t slice_bytes;
  uint32_t chunks[CollectiveGeometry::kMaxRanks];  // per peer, in the longer direction; 0: none
  uint32_t max_chunks;                             // maximum over all peers
  uint32_t chunk;                                  // units per chunk (CollectivePlan)
  uint64_t ll128_offset;                           // CollectiveLayout::ll128(size)
  uint64_t simple_offset;                          // CollectiveLayout::simple(size)
  uint64_t bulk_offset;                            // CollectiveLayout::bulk(size, max_blocks)
  bool has_single_source;                          // all entries of `send` are equal
  int32_t rank;
  int32_t size;
  ReductionOp op;
  WaitControl control;
  uint64_t memory_id;  // SymmetricMemory::id() of the channel, for error messages
};

// Location in a window of this rank's tensor, which the peers write, or in a reduction read, in
// place.
struct WindowPlacement {
  char* base[CollectiveGeometry::kMaxRanks];  // address of the window on each rank, in this process
  uint64_t offset;                            // offset in bytes of the tensor in the window
  uint64_t place;  // offset in bytes in the peers' tensors of the range that this rank accesses
  // Number of the window, equal on all ranks; 0: no window, or not aligned to vectors.
  uint32_t number;
};

struct LaunchConfig {
  unsigned int blocks;
  unsigned int threads;
  bool dependent;  // programmatic dependent launch; requires has_hopper_code()
  cudaStream_t stream;
  unsigned int cluster = 1;       // blocks per cluster; more than one requires has_hopper_code()
  unsigned int shared_bytes = 0;  // dynamic, in addition to the kernel's static shared memory
};

// RMSNorm (comm/call.h) of `rows` rows of `row_bytes`, in the kernel of an all_reduce or after it.
struct NormParams {
  const char* residual;
  char* residual_out;
  const char* weight;
  const char* bias;  // may be null
  float eps;
  float inverse_elements;  // 1 / elements of a row
  uint64_t row_bytes;
  uint64_t rows;
  uint32_t row_blocks;  // CollectivePlan::row_blocks
  // Quantization of the normalized rows of a 16-bit type, which are stored too if `keeps_rows`.
  NormScaling scaling;
  bool keeps_rows;
  const float* scale;  // NormScaling::tensor: the factor of the values
  uint8_t* quantized;  // e4m3 [rows, elements]
  float* scale_inv;    // tensor: [1]; row: [rows]; block: [blocks of a row, rows]
};

// Copies send[r] to rank r and receives recv[r] from rank r. The own part is copied if the two
// differ.
cudaError_t launch_ll_copy(const CollectiveParams& params, const LaunchConfig& launch);
cudaError_t launch_ll128_copy(const CollectiveParams& params, const LaunchConfig& launch);
cudaError_t launch_simple_copy(const CollectiveParams& params, const LaunchConfig& launch);
// Reduces the data that the ranks send to this one into recv[0], in rank order.
cudaError_t launch_ll_reduce(ReductionType type, const CollectiveParams& params,
                             const LaunchConfig& launch);
cudaError_t launch_ll128_reduce(ReductionType type, const CollectiveParams& params,
                                const LaunchConfig& launch);
cudaError_t launch_simple_reduce(ReductionType type, const CollectiveParams& params,
                                 const LaunchConfig& launch);
// Reduces send[r] of all ranks on rank r, and copies the result to recv[r] of all ranks. Requires
// more than two ranks.
cudaError_t launch_ll128_two_shot(ReductionType type, const CollectiveParams& params,
                                  const LaunchConfig& launch);
// Reduces send[0] of all ranks into recv[0] of all ranks. Rank r reduces slice r.
cudaError_t launch_two_shot(ReductionType type, const CollectiveParams& params,
                            const LaunchConfig& launch);

// The same by bulk copies. Requires has_hopper_code(), and whole vectors that are aligned. An
// all_reduce of more than two ranks is two-shot: its chunks are parts of slices.
cudaError_t launch_bulk_copy(const CollectiveParams& params, const LaunchConfig& launch);
cudaError_t launch_bulk_reduce(ReductionType type, const CollectiveParams& params,
                               const LaunchConfig& launch);
cudaError_t launch_bulk_two_shot(ReductionType type, const CollectiveParams& params,
                                 const LaunchConfig& launch);

// Zero-copy versions of launch_simple_copy, of launch_simple_reduce for a reduce_scatter, and of an
// all_reduce by either protocol. They require whole vectors. Nothing is staged if the tensors of
// all ranks are in one window.
cudaError_t launch_zero_copy(const CollectiveParams& params, const WindowPlacement& window,
                             const LaunchConfig& launch);
cudaError_t launch_zero_copy_reduce(ReductionType type, const CollectiveParams& params,
                                    const WindowPlacement& window, const LaunchConfig& launch);
cudaError_t launch_zero_copy_all_reduce(ReductionType type, const CollectiveParams& params,
                                        const WindowPlacement& window, const LaunchConfig& launch);

// launch_ll_reduce and so on for an all_reduce, followed by an RMSNorm of the result. Types: f16,
// bf16 and f32. A cluster of `row_blocks` blocks processes one row.
cudaError_t launch_ll_norm(ReductionType type, const CollectiveParams& params,
                           const NormParams& norm, const LaunchConfig& launch);
cudaError_t launch_ll128_norm(ReductionType type, const CollectiveParams& params,
                              const NormParams& norm, const LaunchConfig& launch);
cudaError_t launch_simple_norm(ReductionType type, const CollectiveParams& params,
                               const NormParams& norm, const LaunchConfig& launch);
// Normalizes rows of sums in place, without communication. Requires supports_rms_norm().
bool supports_rms_norm(ReductionType type, uint64_t row_bytes);
cudaError_t launch_norm(ReductionType type, char* rows, const NormParams& norm,
                        cudaStream_t stream);

// Sets `has` if the code for the current device was compiled for sm_90 or newer. On any device the
// code may come from older PTX, in which kernels wait neither for a preceding kernel nor for a
// cluster.
cudaError_t has_hopper_code(bool* has);

// Loads the code of all kernels onto the current device. A later load may wait for a running kernel
// that waits for this rank.
cudaError_t load_ll_kernels();
cudaError_t load_ll128_kernels();
cudaError_t load_simple_kernels();
cudaError_t load_two_shot_kernels();
cudaError_t load_zero_copy_kernels();
cudaError_t load_bulk_kernels();
cudaError_t load_norm_kernels();
cudaError_t load_rms_norm_rows_kernels();

}  // namespace torch_overlap::cuda
