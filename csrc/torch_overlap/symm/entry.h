#pragma once

#include <cstdint>

// Progress of ranks, as epochs and flags in memory that they share.
namespace torch_overlap {

// Returns true if `seen` is not before `epoch`, also after the count has wrapped around.
constexpr bool has_reached(uint32_t seen, uint32_t epoch) {
  return static_cast<int32_t>(seen - epoch) >= 0;
}
constexpr uint32_t later_epoch(uint32_t a, uint32_t b) { return has_reached(a, b) ? a : b; }

// Flag by which a rank notifies the others that it has entered an operation: its epoch, and
// EntryPayload::word() (op_signature.h). It is one word of 8 bytes, which arrives as a whole, so
// neither half has to wait for the other. Even and odd operations alternate between two flags,
// since a rank may enter the next operation before all ranks have seen this flag.
using EntryFlag = uint64_t;
inline constexpr uint32_t kNumEntryFlags = 2;

constexpr EntryFlag make_entry_flag(uint32_t epoch, uint32_t payload) {
  return static_cast<EntryFlag>(payload) << 32 | epoch;
}
constexpr uint32_t epoch_of(EntryFlag entry) { return static_cast<uint32_t>(entry); }
constexpr uint32_t payload_of(EntryFlag entry) { return static_cast<uint32_t>(entry >> 32); }
// Index of the operation's flag, and offset from it to the other one.
constexpr uint32_t entry_slot(uint32_t epoch) { return epoch % kNumEntryFlags; }
constexpr int other_entry_offset(uint32_t epoch) { return epoch % kNumEntryFlags == 0 ? 1 : -1; }
static_assert(kNumEntryFlags == 2);

// Returns true if the rank whose flag of the operation `epoch` is `seen` has entered it. The flag
// is overwritten by that of the operation after the next. A flag that this rank has not read for
// long may be so old that it would seem to be ahead.
constexpr bool has_entered(EntryFlag seen, uint32_t epoch) {
  return epoch_of(seen) - epoch <= kNumEntryFlags;
}

}  // namespace torch_overlap
