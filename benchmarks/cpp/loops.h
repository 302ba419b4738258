#pragma once

#include <cstddef>
#include <cstdint>

// The two loops that the host's time is measured with. Each returns the seconds of host time that
// `calls` asynchronous all_reduce calls of `count` floats took, or a negative number if one failed;
// the caller synchronizes. C linkage: benchmarks/host_overhead.py calls them, too.
extern "C" {

// ncclAllReduce on the communicator `comm` (an ncclComm_t) and `stream` (a cudaStream_t).
__attribute__((visibility("default"))) double raw_all_reduce_loop(int64_t comm, void* data,
                                                                  size_t count, int calls,
                                                                  void* stream);

// TorchComm::all_reduce of the live communicator `name`.
__attribute__((visibility("default"))) double torch_comm_all_reduce_loop(const char* name,
                                                                         size_t count, int calls);
}
