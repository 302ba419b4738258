#pragma once

#include <vector>

#include "torch_overlap/overlap/config.h"

namespace torch_overlap::python {

// Returns the algorithms of the GEMMs of a buffer with this configuration.
std::vector<CommOverlapAlgo> algos_of(const CommOverlapConfig& config);

}  // namespace torch_overlap::python
