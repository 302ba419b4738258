#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace torch_overlap {

// Several operations as one: it ends when all have ended, and fails with the first error. Null if
// there are none; one alone is returned as it is.
c10::intrusive_ptr<c10d::Work> join_works(std::vector<c10::intrusive_ptr<c10d::Work>> works);

}  // namespace torch_overlap
