#pragma once

#include <cstdint>

#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {

// The number of the next signal of `src` that nobody waits for yet, counted from 1. From now on it
// is this caller's.
uint64_t take_ticket(SymmetricMemory& window, int src);

}  // namespace torch_overlap
