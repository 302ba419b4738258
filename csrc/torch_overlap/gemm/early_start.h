#pragma once

namespace torch_overlap {

// Start of a product of few rows, which is bound by loading rhs, on devices whose kernel for it can
// start while the last kernel on the current stream still runs.
enum class EarlyStart {
  none,   // after that kernel
  waits,  // it starts, and waits for that kernel to end
  // It loads rhs and its scales. That kernel does not write them, and waits for those before it.
  loads_rhs,
};

}  // namespace torch_overlap
