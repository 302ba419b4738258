#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "torch_overlap/comm/call.h"

namespace torch_overlap::python {

// The arguments of a call in the order of the user's method, under the names that hooks use:
// `tensor`, or `input` and `output`; `peer` or `root`; `op`; split sizes; `ops`; `async_op`. Lists
// are in rank order. Their elements may be flat views of the user's tensors.
using Arguments = std::vector<std::pair<const char*, pybind11::object>>;
Arguments arguments_of(const Call& call, int size);

}  // namespace torch_overlap::python
