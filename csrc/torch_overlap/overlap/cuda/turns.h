#pragma once

#include <c10/core/Device.h>

#include <memory>

namespace torch_overlap::cuda {

// Operations whose kernels keep nearly all SMs of a device while they wait for what other ranks
// compute: they take turns, whatever group and stream each is of, in the order of the calls, which
// has to be that of the other ranks. Two of them at once, in another order on another rank, would
// wait for each other. Those of a capture take turns among themselves (where captures on a device
// are interleaved, those in a row): in what order replays come, and eager operations beside them,
// is the caller's business.
//
// The current stream comes behind all that was on the stream of the one before, until its end; from
// here until what is returned is gone, other threads that come here wait. So nothing before the
// first one on its stream may wait for what comes behind the second one, on any rank.
std::shared_ptr<void> take_turn(c10::DeviceIndex device);

}  // namespace torch_overlap::cuda
