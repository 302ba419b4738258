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
  ~Boundary() override { set_throw_counterpart(nullptr); }
};

TEST_F(Boundary, HandsOnWhatACallReturns) {
  int value = 1;
  int& same = at_boundary([&]() -> int& { return value; });
  EXPECT_EQ(&same, &value);
  at_boundary([&] { value = 2; });
  EXPECT_EQ(value, 2);
}

TEST_F(Boundary, LeavesAnErrorAsItIsWithoutACounterpart) {
  try {
    at_boundary([] { fail(ErrorKind::kType, "send: expected a tensor, got ", 3); });
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kType);
    EXPECT_STREQ(error.what(), "send: expected a tensor, got 3");
  }
}

TEST_F(Boundary, ThrowsTheCounterpartOfAnErrorOnce) {
  set_throw_counterpart([](const Error& error) { throw Counterpart{error.kind(), error.what()}; });
  try {
    at_boundary([] { at_boundary([] { fail(ErrorKind::kTimeout, "too late"); }); });
    FAIL() << "nothing was thrown";
  } catch (const Counterpart& thrown) {
    EXPECT_EQ(thrown.kind, ErrorKind::kTimeout);
    EXPECT_EQ(thrown.message, "too late");
  }
}

TEST_F(Boundary, DoesNotTouchWhatIsNoError) {
  set_throw_counterpart([](const Error&) { throw Counterpart{}; });
  EXPECT_THROW(at_boundary([] { throw std::out_of_range("seven"); }), std::out_of_range);
}

}  // namespace
}  // namespace torch_overlap
