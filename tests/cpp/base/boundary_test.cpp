#include "torch_overlap/base/boundary.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>

namespace torch_overlap {
namespace {

struct Counterpart {
  ErrorKind kind;
  std::string message;
};

class Boundary : public testing::Test {
 protected:
  ~Boundary() override { set_exception_translator(nullptr); }
};

TEST_F(Boundary, HandsOnWhatACallReturns) {
  int value = 1;
  int& same = with_exception_translation([&]() -> int& { return value; });
  EXPECT_EQ(&same, &value);
  with_exception_translation([&] { value = 2; });
  EXPECT_EQ(value, 2);
}

TEST_F(Boundary, LeavesAnErrorAsItIsWithoutACounterpart) {
  try {
    with_exception_translation([] { fail(ErrorKind::kType, "send: expected a tensor, got ", 3); });
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kType);
    EXPECT_STREQ(error.what(), "send: expected a tensor, got 3");
  }
}

TEST_F(Boundary, ThrowsTheCounterpartOfAnErrorOnce) {
  set_exception_translator(
      [](const Error& error) { throw Counterpart{error.kind(), error.what()}; });
  try {
    with_exception_translation(
        [] { with_exception_translation([] { fail(ErrorKind::kTimeout, "too late"); }); });
    FAIL() << "nothing was thrown";
  } catch (const Counterpart& thrown) {
    EXPECT_EQ(thrown.kind, ErrorKind::kTimeout);
    EXPECT_EQ(thrown.message, "too late");
  }
}

TEST_F(Boundary, DoesNotTouchWhatIsNoError) {
  set_exception_translator([](const Error&) { throw Counterpart{}; });
  EXPECT_THROW(with_exception_translation([] { throw std::out_of_range("seven"); }),
               std::out_of_range);
}

}  // namespace
}  // namespace torch_overlap
