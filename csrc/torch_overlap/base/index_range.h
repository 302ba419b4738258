#pragma once

#include <cstdint>

namespace torch_overlap {

// Consecutive indices [begin, begin + length) of rows, columns or elements.
struct IndexRange {
  int64_t begin;
  int64_t length;
  bool operator==(const IndexRange&) const = default;
};

}  // namespace torch_overlap
