#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_overlap {

// Counts of signals among the ranks that share a symmetric memory. Each rank's pad holds, per
// source rank, the number of its signals that have arrived and the number that have been waited
// for, each in a line of 128 bytes:
//
//   pad of rank r:  arrived[0] .. arrived[n-1]  consumed[0] .. consumed[n-1]
//
//   signal(p) on r:       arrived[r] of p's pad += 1, after all earlier writes of r
//   wait_signal(p) on r:  v = ++consumed[p] of r's own pad; waits until arrived[p] of it is >= v
//
// Exactly one wait therefore consumes a signal. All counts are in the memory itself, so an
// operation that is replayed from a graph counts like one that is issued eagerly.
class SignalPad {
 public:
  // Bytes of one count. No two ranks write to the same line.
  static constexpr size_t kSlotBytes = 128;
  static constexpr size_t bytes(int size) { return 2 * static_cast<size_t>(size) * kSlotBytes; }

  SignalPad() = default;
  // `pads` holds every rank's pad as mapped in this process; null if it cannot be reached.
  SignalPad(int rank, std::vector<void*> pads) : rank_(rank), pads_(std::move(pads)) {}

  // Offset in bytes of the count of `source`'s signals in a pad.
  static constexpr size_t offset(int source) { return static_cast<size_t>(source) * kSlotBytes; }
  void* own() const { return pads_[rank_]; }

  // Returns the count that this rank's signals to `peer` increment.
  uint64_t* to(int peer) const { return line(peer, rank_); }
  uint64_t* arrived(int source) const { return line(rank_, source); }
  uint64_t* consumed(int source) const {
    return line(rank_, static_cast<int>(pads_.size()) + source);
  }

 private:
  uint64_t* line(int owner, int index) const {
    return reinterpret_cast<uint64_t*>(static_cast<std::byte*>(pads_[owner]) + index * kSlotBytes);
  }

  int rank_ = 0;
  std::vector<void*> pads_;
};

}  // namespace torch_overlap
