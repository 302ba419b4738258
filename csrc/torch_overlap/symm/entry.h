#pragma once

#include <cstdint>

// How far ranks have come, by their words in memory that they share.
namespace torch_overlap {

// Whether `seen` is not before `epoch`, also when the count has wrapped.
constexpr bool reached(uint32_t seen, uint32_t epoch) {
  return static_cast<int32_t>(seen - epoch) >= 0;
}
constexpr uint32_t later_of(uint32_t a, uint32_t b) { return reached(a, b) ? a : b; }

// What a rank tells the others when it begins an operation: its epoch, and the word of Begin
// (begin.h). One word of 8 bytes, which is there as one, or not yet: neither half has to wait
// until the other has arrived. Those of even and of odd operations take turns, since a rank may
// begin the next one before all have seen this.
using BegunEntry = uint64_t;
inline constexpr uint32_t kBegunEntries = 2;

constexpr BegunEntry entry_of(uint32_t epoch, uint32_t said) {
  return static_cast<BegunEntry>(said) << 32 | epoch;
}
constexpr uint32_t epoch_of(BegunEntry entry) { return static_cast<uint32_t>(entry); }
constexpr uint32_t said_of(BegunEntry entry) { return static_cast<uint32_t>(entry >> 32); }
// Which of them it is; and from there to the other one.
constexpr uint32_t entry_at(uint32_t epoch) { return epoch % kBegunEntries; }
constexpr int to_other_entry(uint32_t epoch) { return epoch % kBegunEntries == 0 ? 1 : -1; }
static_assert(kBegunEntries == 2);

// That of the operation is overwritten by the next but one. One that this rank has not looked at
// for long may be far behind, so that it would seem to be ahead.
constexpr bool reached(BegunEntry seen, uint32_t epoch) {
  return epoch_of(seen) - epoch <= kBegunEntries;
}

}  // namespace torch_overlap
