#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_overlap {

// What a rank keeps for the others to write to, for each block of a kernel. Two rounds of lines,
// four of lines of 128 bytes and of plain data, and sixteen of bulk copies have slots: why these
// are enough is in docs/kernels.md.
struct DirectGeometry {
  static constexpr int kMostRanks = 8;
  static constexpr int kThreads = 256;     // at most, of a block
  static constexpr int kMostBlocks = 256;  // of any kernel
  // Lines, of two ranks and of more: two rounds of all blocks are 8 MiB at most.
  static constexpr int most_line_blocks(int size) { return size <= 2 ? 256 : 128; }
  static constexpr int kLineBytes = 16;    // 12 of data, or one element of 8 bytes
  static constexpr int kLines = kThreads;  // of a block in a round, from each rank: one a thread
  // Lines of 128 bytes, four of which, a unit, a warp stores by one instruction.
  static constexpr int kWideLineBytes = 128;
  static constexpr int kWideLineData = 120;
  static constexpr int kWideUnitBytes = 4 * kWideLineBytes;
  static constexpr int kWideUnitData = 4 * kWideLineData;
  static constexpr int kWideUnits = 8;  // of a block in a round, from each rank: one a warp
  static constexpr int kWideSlots = 4;  // rounds of them
  static constexpr int most_wide_blocks(int size) {
    if (size <= 2) return 192;
    return size <= 4 ? 128 : 64;
  }
  // Of parts; of more than two ranks also of sums, in an all_reduce by two shots.
  static constexpr int wide_kinds(int size) { return size <= 2 ? 1 : 2; }
  static constexpr int kVectorBytes = 16;  // a store of push
  static constexpr int kVectors = 512;     // of a block in a round, from each rank
  static constexpr int kLineSlots = 2;     // rounds of lines of 16 bytes
  static constexpr int kVectorSlots = 4;   // rounds of push
  static constexpr int kFlagBytes = 128;   // the flags of one source: a line of the cache
  // Kernels that push, of two ranks, up to four, and up to eight: as much memory for each.
  static constexpr int kPushBlocksOf2 = 256;
  static constexpr int kPushBlocksOf4 = 128;
  static constexpr int kPushBlocksOf8 = 64;
  static constexpr int kMostRowBlocks = 8;  // a cluster that any GPU with clusters can hold
  // Kernels that move chunks by bulk copies: few blocks, large chunks.
  static constexpr int most_bulk_blocks(int size) { return size <= 2 ? 64 : 32; }
  static constexpr int kBulkAhead = 8;               // rounds that are under way at most
  static constexpr int kBulkSlots = 2 * kBulkAhead;  // rounds, of each kind of data
  // Of a chunk at most: parts of all ranks have to fit shared memory.
  static constexpr uint32_t bulk_bytes(int size) {
    if (size <= 2) return 16384;
    return size <= 4 ? 8192 : 4096;
  }
  // An all_reduce of more than two ranks also has slots for sums.
  static constexpr int bulk_kinds(int size) { return size <= 2 ? 1 : 2; }
};

}  // namespace torch_overlap
