#pragma once

namespace torch_overlap {

// What a rank keeps for the others to write to, for each block of a kernel. Two rounds of lines and
// four of plain data are under way at most: why these are enough is in docs/kernels.md.
struct DirectGeometry {
  static constexpr int kMostRanks = 8;
  static constexpr int kThreads = 256;     // at most, of a block
  static constexpr int kMostBlocks = 256;  // of any kernel
  static constexpr int kMostLineBlocks = 128;
  static constexpr int kLineBytes = 16;    // 12 of data, or one element of 8 bytes
  static constexpr int kLines = kThreads;  // of a block in a round, from each rank: one a thread
  static constexpr int kVectorBytes = 16;  // a store of push
  static constexpr int kVectors = 512;     // of a block in a round, from each rank
  static constexpr int kLineSlots = 2;     // rounds of lines
  static constexpr int kVectorSlots = 4;   // rounds of push
  static constexpr int kFlagBytes = 128;   // one flag a line of the cache
  // Kernels that push, of two ranks, up to four, and up to eight: as much memory for each.
  static constexpr int kPushBlocksOf2 = 256;
  static constexpr int kPushBlocksOf4 = 128;
  static constexpr int kPushBlocksOf8 = 64;
  static constexpr int kMostRowBlocks = 8;  // a cluster that any GPU with clusters can hold
};

}  // namespace torch_overlap
