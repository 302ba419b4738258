#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>

namespace torch_overlap::sm90 {

// The counts of a kernel that shares tiles along k (StreamKParams::arrived), of the device and
// stream, which is current. They are 0, and a kernel leaves them so: those of one stream come one
// after the other. A capture gets counts of its own for this call, until its graph is gone:
// replays run beside what is on other streams.
uint32_t* arrivals_for(c10::cuda::CUDAStream stream);

}  // namespace torch_overlap::sm90
