#include "torch_overlap/common/views.h"

#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

TEST(Views, RowsAreThoseOfNarrow) {
  const auto whole = at::randn({7, 12}).narrow(1, 2, 5);
  const auto rows = row_view(whole, 3, 2);
  const auto expected = whole.narrow(0, 3, 2);
  EXPECT_EQ(rows.sizes(), expected.sizes());
  EXPECT_EQ(rows.strides(), expected.strides());
  EXPECT_EQ(rows.const_data_ptr(), expected.const_data_ptr());
  EXPECT_TRUE(rows.equal(expected));
  EXPECT_EQ(row_view(whole, 7, 0).sizes(), at::IntArrayRef({0, 5}));
  EXPECT_TRUE(row_view(whole, 0, 7).is_same(whole));
}

TEST(Views, OfBytesAreThoseOfAnotherType) {
  const auto bytes = at::randint(256, {64}, at::kByte);
  const auto expected = bytes.narrow(0, 16, 24).view(at::kShort).view({3, 4});
  EXPECT_TRUE(typed_view(bytes, 16, {3, 4}, at::kShort).equal(expected));
  EXPECT_EQ(typed_view(bytes, 64, {0, 4}, at::kShort).numel(), 0);
}

TEST(Views, ShareTheVersionOfTheWhole) {
  const auto whole = at::randn({4, 4});
  const auto before = whole._version();
  row_view(whole, 1, 2).zero_();
  EXPECT_EQ(whole._version(), before + 1);
}

TEST(Views, LieWithin) {
  const auto whole = at::randn({4, 4});
  EXPECT_THROW(row_view(whole, 3, 2), Error);
  EXPECT_THROW(row_view(whole, -1, 2), Error);
  const auto bytes = at::randint(256, {64}, at::kByte);
  EXPECT_THROW(typed_view(bytes, 60, {4}, at::kShort), Error);
  EXPECT_THROW(typed_view(bytes, 1, {4}, at::kShort), Error);
}

}  // namespace
}  // namespace torch_overlap
