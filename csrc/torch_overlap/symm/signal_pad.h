#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_overlap {

// Counts of signals among the ranks that share a symmetric memory. Each rank's pad holds, for every
// source, how many signals of it have arrived, and how many were waited for:
//
//   pad of rank r:  arrived[0] .. arrived[n-1]  consumed[0] .. consumed[n-1]    a line of 128 bytes
//   each
//
//   signal(p) on r:       arrived[r] of p's pad += 1, after everything r wrote before
//   wait_signal(p) on r:  v = ++consumed[p] of r's own pad; waits until arrived[p] of it is >= v
//
// So a signal is consumed by exactly one wait. All counts live in the memory itself: an operation
// that is replayed from a graph counts as one that is issued anew.
class SignalPad {
 public:
  // Of one count, so that no two ranks write to one line.
  static constexpr size_t kLineBytes = 128;
  static constexpr size_t bytes(int size) { return 2 * static_cast<size_t>(size) * kLineBytes; }

  SignalPad() = default;
  // Every rank's pad as this process sees it; null where it cannot.
  SignalPad(int rank, std::vector<void*> pads) : rank_(rank), pads_(std::move(pads)) {}

  // Where the count of `source`'s signals is in a pad, in bytes.
  static constexpr size_t offset(int source) { return static_cast<size_t>(source) * kLineBytes; }
  void* own() const { return pads_[rank_]; }

  // The count that this rank's signals to `peer` go to.
  uint64_t* to(int peer) const { return line(peer, rank_); }
  uint64_t* arrived(int source) const { return line(rank_, source); }
  uint64_t* consumed(int source) const {
    return line(rank_, static_cast<int>(pads_.size()) + source);
  }

 private:
  uint64_t* line(int owner, int index) const {
    return reinterpret_cast<uint64_t*>(static_cast<std::byte*>(pads_[owner]) + index * kLineBytes);
  }

  int rank_ = 0;
  std::vector<void*> pads_;
};

}  // namespace torch_overlap
