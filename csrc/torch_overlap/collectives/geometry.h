#pragma once

#include <cstdint>

namespace torch_overlap {

// Memory that a rank keeps for the others to write to, for each block of a kernel. Two rounds of LL
// packets, four of LL128 lines and of Simple, and sixteen of bulk copies have slots.
// docs/design/kernels.md explains why these are enough.
struct CollectiveGeometry {
  static constexpr int kMaxRanks = 8;
  static constexpr int kThreads = 256;    // maximum per block
  static constexpr int kMaxBlocks = 256;  // maximum of any kernel
  // Maximum number of LL blocks. Two rounds of all blocks need at most 8 MiB.
  static constexpr int max_ll_blocks(int size) { return size <= 2 ? 256 : 128; }
  static constexpr int kLLPacketBytes = 16;    // 12 bytes of data, or one element of 8 bytes
  static constexpr int kLLPackets = kThreads;  // per block, round and source: one per thread
  // LL128: lines of 128 bytes. A warp stores a unit of four lines with one instruction.
  static constexpr int kLL128LineBytes = 128;
  static constexpr int kLL128LineData = 120;
  static constexpr int kLL128UnitBytes = 4 * kLL128LineBytes;
  static constexpr int kLL128UnitData = 4 * kLL128LineData;
  static constexpr int kLL128Units = 8;  // per block, round and source: one per warp
  static constexpr int kLL128Slots = 4;  // number of rounds that have slots
  static constexpr int max_ll128_blocks(int size) {
    if (size <= 2) return 192;
    return size <= 4 ? 128 : 64;
  }
  // Number of kinds of LL128 data: parts and, for more than two ranks, sums of a two-shot
  // all_reduce.
  static constexpr int ll128_kinds(int size) { return size <= 2 ? 1 : 2; }
  static constexpr int kVectorBytes = 16;  // one store of Simple
  static constexpr int kVectors = 512;     // per block, round and source
  static constexpr int kLLSlots = 2;       // number of LL rounds that have slots
  static constexpr int kSimpleSlots = 4;   // number of Simple rounds that have slots
  static constexpr int kFlagBytes = 128;   // flags of one source: one cache line
  // Maximum number of Simple blocks for two, up to four, and up to eight ranks. Each needs the same
  // amount of memory.
  static constexpr int kMaxSimpleBlocksOf2 = 256;
  static constexpr int kMaxSimpleBlocksOf4 = 128;
  static constexpr int kMaxSimpleBlocksOf8 = 64;
  static constexpr int kMaxRowBlocks = 8;  // any GPU with clusters can hold such a cluster
  // Bulk copies use few blocks and large chunks.
  static constexpr int max_bulk_blocks(int size) { return size <= 2 ? 64 : 32; }
  static constexpr int kBulkAhead = 8;  // maximum number of rounds in flight
  // Number of rounds that have slots, per kind of data.
  static constexpr int kBulkSlots = 2 * kBulkAhead;
  // Maximum bytes of a chunk: the parts of all ranks must fit into shared memory.
  static constexpr uint32_t bulk_bytes(int size) {
    if (size <= 2) return 16384;
    return size <= 4 ? 8192 : 4096;
  }
  // An all_reduce of more than two ranks also has slots for sums.
  static constexpr int bulk_kinds(int size) { return size <= 2 ? 1 : 2; }
};

}  // namespace torch_overlap
