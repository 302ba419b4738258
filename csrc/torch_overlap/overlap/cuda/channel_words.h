#pragma once

#include <cstdint>

namespace torch_overlap::cuda {

inline constexpr int kMaxRanks = 64;

// Device-side view of this rank's part of a channel (ChannelLayout). Words on other ranks are
// passed as separate pointers.
struct ChannelWords {
  uint32_t* epoch;
  uint32_t* ticket;      // Zero between kernels.
  uint32_t* abort_flag;  // Set by a rank that has aborted.
  uint64_t id;           // SymmetricMemory::id() on this rank, for error messages.
  int rank;
  int size;
};

}  // namespace torch_overlap::cuda
