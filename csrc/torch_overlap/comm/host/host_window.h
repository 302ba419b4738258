#pragma once

#include <cstdint>

#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {

// Claims the next signal of `src` that no wait has claimed. Returns its number, counted from 1.
uint64_t take_ticket(SymmetricMemory& window, int src);

}  // namespace torch_overlap
