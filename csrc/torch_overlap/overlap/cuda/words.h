#pragma once

#include <cstdint>

namespace torch_overlap::cuda {

inline constexpr int kMostRanks = 64;

// A part of a channel on this rank (ChannelLayout), as kernels see it. Words of other ranks come as
// pointers of their own.
struct ChannelWords {
  uint32_t* epoch;
  uint32_t* ticket;  // 0 between kernels
  uint32_t* gone;    // set by a rank that has given up
  uint64_t id;       // of the memory, for errors: of the rank that it is of
  int rank;
  int size;
};

}  // namespace torch_overlap::cuda
