#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "torch_overlap/comm/direct_geometry.h"
#include "torch_overlap/symm/cuda/wait_record.h"

// Collectives by kernels over memory that the ranks map from each other: docs/kernels.md.
namespace torch_overlap::cuda {

// One channel's memory on every rank: the same layout, from `base` on. Two kernels of one channel
// never run at once on a rank.
//
//   epochs   of each block and peer: how many rounds both have done together
//   busy     of each block: a kernel runs
//   noted    one word: whether the kernel that runs has told the host that a rank is late
//   flags    of each block and source, twice: the last round whose data is there, in the first word
//            for push (of two shots: of slices, and of sums), in the next two of the first line for
//            bulk copies (parts, sums)
//   places   of each block, slot and source: a line that says where a rank's tensor lies
//   lines    of each block, slot and source: of 16 bytes
//   wide     the same, of 128: parts, and of more than two ranks sums
//   vectors  the same, for push
//   bulk     the same, for bulk copies: parts, and of more than two ranks sums
struct DirectLayout {
  using G = DirectGeometry;
  static constexpr size_t kEpochs = 0;
  static constexpr size_t kBusy = kEpochs + G::kMostBlocks * G::kMostRanks * sizeof(uint32_t);
  static constexpr size_t kNoted = kBusy + G::kMostBlocks * sizeof(uint32_t);
  static constexpr size_t kFlags = 16384;
  static constexpr size_t kFlagsOfOneKind = G::kMostBlocks * G::kMostRanks * G::kFlagBytes;
  static constexpr size_t kPlaces = kFlags + 2 * kFlagsOfOneKind;
  static constexpr size_t kPlacesOfOneBlock = G::kLineSlots * G::kMostRanks * G::kLineBytes;
  static constexpr size_t kLines = kPlaces + G::kMostBlocks * kPlacesOfOneBlock;
  static_assert(kNoted + sizeof(uint32_t) <= kFlags);

  static constexpr size_t lines_of_one_rank() { return size_t{G::kLines} * G::kLineBytes; }
  static constexpr size_t vectors_of_one_rank() { return size_t{G::kVectors} * G::kVectorBytes; }
  static constexpr size_t wide_of_one_rank() { return size_t{G::kWideUnits} * G::kWideUnitBytes; }
  static constexpr size_t wide(int size) {
    return kLines + size_t(G::most_line_blocks(size)) * G::kLineSlots * size * lines_of_one_rank();
  }
  static constexpr size_t vectors(int size) {
    return wide(size) + size_t(G::most_wide_blocks(size)) * G::kWideSlots * G::wide_kinds(size) *
                            size * wide_of_one_rank();
  }
  static constexpr size_t bulk(int size, int most_blocks) {
    return vectors(size) + size_t{G::kVectorSlots} * most_blocks * size * vectors_of_one_rank();
  }
  static constexpr size_t bytes(int size, int most_blocks) {
    return bulk(size, most_blocks) + size_t{G::kBulkSlots} * G::most_bulk_blocks(size) *
                                         G::bulk_kinds(size) * (size - 1) * G::bulk_bytes(size);
  }
};

enum class DirectOp : uint32_t { sum, average, product, min, max };
enum class DirectType : uint32_t { i32, i64, f16, bf16, f32, f64 };

struct DirectParams {
  char* base[DirectGeometry::kMostRanks];  // of the channel on each rank, as this process sees it
  // What goes to each rank, and where what comes from each goes: bytes. In a reduction every part
  // has `bytes[0]` bytes, send[rank] is this rank's own contribution, and recv[0] the result; but
  // in two shots by lines they are slices, of which the last ones may be shorter.
  const char* send[DirectGeometry::kMostRanks];
  char* recv[DirectGeometry::kMostRanks];
  uint64_t send_bytes[DirectGeometry::kMostRanks];
  uint64_t recv_bytes[DirectGeometry::kMostRanks];
  uint32_t chunks[DirectGeometry::kMostRanks];  // of the longer of the two; 0: nothing is said
  uint32_t most_chunks;                         // of all peers
  uint32_t chunk;                               // units: see DirectPlan
  uint64_t wide_at;                             // DirectLayout::wide(size)
  uint64_t vectors_at;                          // DirectLayout::vectors(size)
  uint64_t bulk_at;                             // DirectLayout::bulk(size, most_blocks)
  bool one_source;                              // all of `send` are the same
  int32_t rank;
  int32_t size;
  DirectOp op;
  WaitControl control;
  uint64_t window;
};

// Where this rank's tensor lies, of what the peers write to, or in a reduction read, where it is.
struct DirectWindow {
  char* base[DirectGeometry::kMostRanks];  // of the window on each rank, as this process sees it
  uint64_t offset;                         // of the tensor in it
  uint64_t place;   // in the peers' tensors: of what this rank writes or reads there
  uint32_t number;  // of the window, alike on all ranks; 0: in none, or not aligned to vectors
};

struct DirectLaunch {
  unsigned int blocks;
  unsigned int threads;
  bool dependent;  // programmatic dependent launch, where has_hopper_code()
  cudaStream_t stream;
  unsigned int cluster = 1;       // blocks of a cluster, where has_hopper_code()
  unsigned int shared_bytes = 0;  // beside what the kernel has itself
};

// RMSNorm (comm/call.h) of rows of `row_bytes`, in the kernel of an all_reduce or behind it.
struct NormParams {
  const char* residual;
  char* residual_out;
  const char* weight;
  const char* bias;  // or null
  float eps;
  uint64_t row_bytes;
  uint32_t row_blocks;  // DirectPlan's
};

// send[r] to rank r, recv[r] from rank r, own part included where the two differ.
cudaError_t launch_line_copy(const DirectParams& params, const DirectLaunch& launch);
cudaError_t launch_ll128_copy(const DirectParams& params, const DirectLaunch& launch);
cudaError_t launch_push_copy(const DirectParams& params, const DirectLaunch& launch);
// recv[0] becomes the reduction of what the ranks send here, in the order of ranks.
cudaError_t launch_line_reduce(DirectType type, const DirectParams& params,
                               const DirectLaunch& launch);
cudaError_t launch_ll128_reduce(DirectType type, const DirectParams& params,
                                const DirectLaunch& launch);
cudaError_t launch_push_reduce(DirectType type, const DirectParams& params,
                               const DirectLaunch& launch);
// send[r] of all ranks, reduced by rank r, to recv[r] of all. Of more than two ranks.
cudaError_t launch_ll128_two_shot(DirectType type, const DirectParams& params,
                                  const DirectLaunch& launch);
// send[0] of all ranks, reduced, to recv[0] of all: slice r by rank r.
cudaError_t launch_two_shot(DirectType type, const DirectParams& params,
                            const DirectLaunch& launch);

// The same by bulk copies, where has_hopper_code(), of whole vectors that are aligned as such. An
// all_reduce of more than two ranks is by two shots: chunks are of slices.
cudaError_t launch_bulk_copy(const DirectParams& params, const DirectLaunch& launch);
cudaError_t launch_bulk_reduce(DirectType type, const DirectParams& params,
                               const DirectLaunch& launch);
cudaError_t launch_bulk_two_shot(DirectType type, const DirectParams& params,
                                 const DirectLaunch& launch);

// launch_push_copy, launch_push_reduce of a reduce_scatter, and an all_reduce by either protocol,
// of whole vectors: without copies where the tensors of all ranks lie in one window.
cudaError_t launch_zero_copy(const DirectParams& params, const DirectWindow& window,
                             const DirectLaunch& launch);
cudaError_t launch_zero_copy_reduce(DirectType type, const DirectParams& params,
                                    const DirectWindow& window, const DirectLaunch& launch);
cudaError_t launch_zero_copy_all_reduce(DirectType type, const DirectParams& params,
                                        const DirectWindow& window, const DirectLaunch& launch);

// launch_line_reduce and launch_push_reduce of an all_reduce, with an RMSNorm of what comes out:
// f16, bf16 and f32. Clusters of `row_blocks` have a row.
cudaError_t launch_line_norm(DirectType type, const DirectParams& params, const NormParams& norm,
                             const DirectLaunch& launch);
cudaError_t launch_push_norm(DirectType type, const DirectParams& params, const NormParams& norm,
                             const DirectLaunch& launch);
// The same of `count` rows of sums, with nobody else. Of rows and types that is_norm_possible().
bool is_norm_possible(DirectType type, uint64_t row_bytes);
cudaError_t launch_norm(DirectType type, char* rows, uint32_t count, const NormParams& norm,
                        cudaStream_t stream);

// Whether the code for the current device was compiled for sm_90 or newer: on any device it may
// have been made from older PTX, in which kernels wait for no other kernel and for no cluster.
cudaError_t has_hopper_code(bool* has);

// Loads the code of all kernels onto the current device: a load later may wait for a kernel that
// waits for this rank.
cudaError_t load_line_kernels();
cudaError_t load_ll128_kernels();
cudaError_t load_push_kernels();
cudaError_t load_two_shot_kernels();
cudaError_t load_zero_copy_kernels();
cudaError_t load_bulk_kernels();
cudaError_t load_norm_kernels();
cudaError_t load_norm_alone();

}  // namespace torch_overlap::cuda
