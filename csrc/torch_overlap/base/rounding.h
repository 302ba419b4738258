#pragma once

#include <cstdint>

// Division and multiples of integers >= 0.
namespace torch_overlap {

// Returns value / divisor, rounded up.
constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}
// Returns the smallest multiple that is not less than `value`.
constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

}  // namespace torch_overlap
