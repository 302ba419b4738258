#include "torch_overlap/comm/options.h"

#include <gtest/gtest.h>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

TEST(Options, AnOperationsHintIsTaken) {
  EXPECT_FALSE(op_hints("op", {}).custom_collectives);
  EXPECT_EQ(op_hints("op", {{"custom_collectives", "off"}}).custom_collectives,
            CollectiveMode::off);
  EXPECT_THROW(op_hints("op", {{"custom_collectives", "1"}}), Error);
}

}  // namespace
}  // namespace torch_overlap
