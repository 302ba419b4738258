#pragma once

#include <cstdint>

namespace torch_overlap {

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

}  // namespace torch_overlap
