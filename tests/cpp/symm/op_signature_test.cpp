// Signatures that ranks publish when they enter an operation.

#include "torch_overlap/symm/op_signature.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

TEST(EntryPayload, AWordSaysRowsAndWay) {
  std::vector<OpSignature> ways{OpSignature::chunks(), OpSignature::all_to_all_rows(),
                                OpSignature::all_to_all_columns(), OpSignature::all_reduce_rows()};
  for (int count = 2; count <= 4; ++count) ways.push_back(OpSignature::pieces(count));
  for (int count = 1; count <= 11; ++count) ways.push_back(OpSignature::columns(count));
  for (int columns = 0; columns <= 256; columns += 32) ways.push_back(OpSignature::kernel(columns));
  std::set<uint32_t> words;
  std::set<std::string> names;
  for (const OpSignature& way : ways) {
    names.insert(way.str());
    for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{8192}, (int64_t{1} << 27) - 1}) {
      const uint32_t word = EntryPayload{.rows = rows, .signature = way}.word();
      words.insert(word);
      EXPECT_EQ(EntryPayload::of(word).rows, rows);
      EXPECT_EQ(EntryPayload::of(word).signature.str(), way.str());
    }
  }
  EXPECT_EQ(words.size(), 4 * ways.size());
  EXPECT_EQ(names.size(), ways.size());
  EXPECT_EQ(OpSignature::columns(1000).str(), OpSignature::columns(11).str());
  EXPECT_EQ(OpSignature::pieces(1).str(), OpSignature::chunks().str());
}

TEST(EntryPayload, WhatAWordHasNoRoomFor) {
  const EntryPayload large{.rows = (int64_t{1} << 40) + 5, .signature = OpSignature::columns(3)};
  EXPECT_EQ(EntryPayload::of(large.word()).rows, 5);
  EXPECT_EQ(EntryPayload::of(large.word()).signature.str(), large.signature.str());
  for (const int count : {0, 5}) EXPECT_THROW(OpSignature::pieces(count), Error) << count;
  EXPECT_THROW(OpSignature::columns(0), Error);
  for (const int columns : {-32, 40, 288})
    EXPECT_THROW(OpSignature::kernel(columns), Error) << columns;
}

TEST(EntryPayload, WhatDiffersIsNamed) {
  const EntryPayload tiles{.rows = 100, .signature = OpSignature::kernel(128)};
  EXPECT_EQ(
      describe_entry_mismatch("b", tiles, "here", {.rows = 104, .signature = OpSignature::chunks()},
                              3),
      "b: expected the same number of rows on all ranks, got 100 here and 104 on rank 3. Pass "
      "equal shapes on all ranks (for a buffer of create_comm_overlap_buffer: call "
      "set_active_tokens alike).");
  EXPECT_EQ(
      describe_entry_mismatch("b", tiles, "here",
                              {.rows = 100, .signature = OpSignature::pieces(2)}, 3),
      "b: expected the same operator and algorithm on all ranks, got a kernel that sends tiles of "
      "128 "
      "columns here and pieces of each rank's rows, 2 on rank 3; give equal shapes, or name an "
      "algorithm that all can take");
}

}  // namespace
}  // namespace torch_overlap
