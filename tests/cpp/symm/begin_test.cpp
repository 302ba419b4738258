// What ranks say of an operation when they begin it.

#include "torch_overlap/symm/begin.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

TEST(Begin, AWordSaysRowsAndWay) {
  std::vector<Way> ways{Way::chunks(), Way::rows_to_all(), Way::columns_to_all(),
                        Way::everywhere()};
  for (int count = 2; count <= 4; ++count) ways.push_back(Way::pieces(count));
  for (int count = 1; count <= 11; ++count) ways.push_back(Way::columns(count));
  for (int columns = 0; columns <= 256; columns += 32) ways.push_back(Way::kernel(columns));
  std::set<uint32_t> words;
  std::set<std::string> names;
  for (const Way& way : ways) {
    names.insert(way.str());
    for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{8192}, (int64_t{1} << 27) - 1}) {
      const uint32_t word = Begin{.rows = rows, .way = way}.word();
      words.insert(word);
      EXPECT_EQ(Begin::of(word).rows, rows);
      EXPECT_EQ(Begin::of(word).way.str(), way.str());
    }
  }
  EXPECT_EQ(words.size(), 4 * ways.size());
  EXPECT_EQ(names.size(), ways.size());
  EXPECT_EQ(Way::columns(1000).str(), Way::columns(11).str());
  EXPECT_EQ(Way::pieces(1).str(), Way::chunks().str());
}

TEST(Begin, WhatAWordHasNoRoomFor) {
  const Begin large{.rows = (int64_t{1} << 40) + 5, .way = Way::columns(3)};
  EXPECT_EQ(Begin::of(large.word()).rows, 5);
  EXPECT_EQ(Begin::of(large.word()).way.str(), large.way.str());
  for (const int count : {0, 5}) EXPECT_THROW(Way::pieces(count), Error) << count;
  EXPECT_THROW(Way::columns(0), Error);
  for (const int columns : {-32, 40, 288}) EXPECT_THROW(Way::kernel(columns), Error) << columns;
}

TEST(Begin, WhatDiffersIsNamed) {
  const Begin tiles{.rows = 100, .way = Way::kernel(128)};
  EXPECT_EQ(
      describe_unlike_begins("b", tiles, "here", {.rows = 104, .way = Way::chunks()}, 3),
      "b: expected the same number of rows on all ranks, got 100 here and 104 on rank 3. Pass "
      "equal shapes on all ranks (for a buffer of create_comm_overlap_buffer: call "
      "set_active_tokens alike).");
  EXPECT_EQ(
      describe_unlike_begins("b", tiles, "here", {.rows = 100, .way = Way::pieces(2)}, 3),
      "b: expected the same operator and algorithm on all ranks, got a kernel that sends tiles of "
      "128 "
      "columns here and pieces of each rank's rows, 2 on rank 3; give equal shapes, or name an "
      "algorithm that all can take");
}

}  // namespace
}  // namespace torch_overlap
