#pragma once

#include <cstddef>
#include <cstdint>

// The loops that the host's time is measured with. Each returns the seconds of host time that
// `calls` calls took. C linkage: benchmarks/host_overhead.py and gemm_host.py call them, too. Those
// of asynchronous all_reduce calls of `count` floats return a negative number if one failed; the
// caller synchronizes.
extern "C" {

// ncclAllReduce on the communicator `comm` (an ncclComm_t) and `stream` (a cudaStream_t).
__attribute__((visibility("default"))) double raw_all_reduce_loop(int64_t comm, void* data,
                                                                  size_t count, int calls,
                                                                  void* stream);

// TorchComm::all_reduce of the live communicator `name`.
__attribute__((visibility("default"))) double torch_comm_all_reduce_loop(const char* name,
                                                                         size_t count, int calls);

// The tensor maps of `matrices` matrices of bfloat16 in turns, which begin 16 bytes apart. Nothing
// reads the memory.
__attribute__((visibility("default"))) double tensor_map_loop(const void* data, int matrices,
                                                              int calls);
}
