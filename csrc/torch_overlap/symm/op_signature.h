#pragma once

#include <cstdint>
#include <string>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Data exchange of an overlapped operation: the layout of the data that ranks write, and the flags
// that signal it. Ranks with different signatures would read data that was never written, or wait
// for a flag that is never set.
class TORCH_OVERLAP_API OpSignature {
 public:
  // All rows of a rank at once, with one flag per rank.
  static OpSignature chunks() { return OpSignature(0); }
  // Rows of a rank (pieces) or columns of all ranks (columns) in `count` pieces with one flag each.
  // One piece of rows is a chunk.
  static OpSignature pieces(int count);
  static OpSignature columns(int count);
  // A kernel that sends, with flags of its own. If the flags are per tile, `tile_columns` is the
  // number of columns of a tile.
  static OpSignature kernel(int tile_columns = 0);
  // All-to-alls: rows, or columns, from each rank to each other rank.
  static OpSignature all_to_all_rows();
  static OpSignature all_to_all_columns();
  // Sum of all rows, on every rank.
  static OpSignature all_reduce_rows();

  explicit OpSignature(uint32_t code) : code_(code) {}
  uint32_t code() const { return code_; }
  std::string str() const;

 private:
  uint32_t code_;
};

// Payload of the flag of a rank that enters an operation. It must be equal on all ranks.
struct TORCH_OVERLAP_API EntryPayload {
  int64_t rows = 0;  // sum over all ranks; the word has it modulo 2^27
  OpSignature signature = OpSignature::chunks();

  uint32_t word() const;
  static EntryPayload of(uint32_t word);
};

// Returns the error text for an operation of buffer `name` that this rank entered with `own`,
// described as `here`, and `rank` with `other`.
TORCH_OVERLAP_API std::string describe_entry_mismatch(const std::string& name,
                                                      const EntryPayload& own,
                                                      const std::string& here,
                                                      const EntryPayload& other, int rank);

}  // namespace torch_overlap
