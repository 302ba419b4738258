#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

namespace torch_overlap {

// Joins several operations into one: it completes when all have completed, and fails with the first
// error. Returns null if there are none; a single one is returned unchanged.
c10::intrusive_ptr<c10d::Work> join_works(std::vector<c10::intrusive_ptr<c10d::Work>> works);

}  // namespace torch_overlap
