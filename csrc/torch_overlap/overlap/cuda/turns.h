#pragma once

#include <c10/core/Device.h>

#include <memory>

namespace torch_overlap::cuda {

// Eager operations whose kernels keep nearly all SMs of a device while they wait for what other
// ranks compute: they take turns, whatever group and stream each is of, in the order of the calls.
// Two of them at once, in another order on another rank, would wait for each other.
//
// The current stream comes behind the last of them; from here until what is returned is gone, other
// threads wait with theirs. Null in a capture: the order of graphs is that of their replays.
std::shared_ptr<void> take_turn(c10::DeviceIndex device);

}  // namespace torch_overlap::cuda
