#pragma once

#include <c10/core/Device.h>

#include <memory>

namespace torch_overlap::cuda {

// Serializes operations whose kernels hold nearly all SMs of a device while they wait for results
// of other ranks. They run in the order of the calls, whatever their group and stream. That order
// must be the same on all ranks: two such operations that run concurrently, and in another order on
// another rank, would wait for each other. Operations of a capture are serialized among themselves
// (if captures on a device are interleaved, only consecutive ones of a capture are). The caller
// must order replays relative to each other and to eager operations.
//
// Makes the current stream wait for all work on the stream of the previous operation, up to its
// end. Other threads that call this function block until the returned object is destroyed.
// Therefore no work enqueued before the first operation on its stream may wait for work enqueued
// after the second one, on any rank.
std::shared_ptr<void> acquire_resident_kernel_lock(c10::DeviceIndex device);

}  // namespace torch_overlap::cuda
