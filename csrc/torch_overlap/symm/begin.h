#pragma once

#include <cstdint>
#include <string>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// How the data of an overlapped operation go between ranks: what is written where, and what tells
// of it. Ranks that go different ways would read what is not there, or wait for what never comes.
class TORCH_OVERLAP_API Way {
 public:
  // The rows of a rank as one, told by the flag of that rank.
  static Way chunks() { return Way(0); }
  // The rows of a rank, and the columns of all, in so many pieces with a flag each. One piece of
  // the rows is a chunk.
  static Way pieces(int count);
  static Way columns(int count);
  // By a kernel that sends, with words of its own; of tiles that have so many columns, where words
  // are those of tiles.
  static Way kernel(int tile_columns = 0);
  // All-to-alls: rows, and columns, of each rank to each other.
  static Way rows_to_all();
  static Way columns_to_all();
  // The sum of all rows on every rank.
  static Way everywhere();

  explicit Way(uint32_t code) : code_(code) {}
  uint32_t code() const { return code_; }
  std::string str() const;

 private:
  uint32_t code_;
};

// What a rank says when it begins an operation, in one word; all must say the same.
struct TORCH_OVERLAP_API Begin {
  int64_t rows = 0;  // of all ranks together; the word has them modulo 2^27
  Way way = Way::chunks();

  uint32_t word() const;
  static Begin of(uint32_t word);
};

// Why an operation of buffer `name` fails that began with `own` here, in these words, and with
// `other` on `rank`.
TORCH_OVERLAP_API std::string describe_unlike_begins(const std::string& name, const Begin& own,
                                                     const std::string& here, const Begin& other,
                                                     int rank);

}  // namespace torch_overlap
