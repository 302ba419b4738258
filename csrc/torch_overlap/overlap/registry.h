#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "torch_overlap/base/export.h"
#include "torch_overlap/overlap/comm_overlap.h"

// Buffers by id, for operators, which cannot take objects. Ids are positive, unique in the process,
// and never reused. Thread-safe.
namespace torch_overlap {

// Collective. Returns the id of the existing buffer for an equal communicator and configuration,
// whose reference count is incremented; otherwise creates one. Configurations are equal if every
// field is. A buffer from before a reconfigure() is not reused.
TORCH_OVERLAP_API int64_t create_comm_overlap_buffer(const std::shared_ptr<TorchComm>& comm,
                                                     const CommOverlapConfig& config);
// Decrements the reference count; the last reference destroys the buffer. Throws kValue, naming the
// id, if it is unknown or destroyed.
TORCH_OVERLAP_API void destroy_comm_overlap_buffer(int64_t id);
// Destroys all buffers, newest first, regardless of their reference counts.
TORCH_OVERLAP_API void destroy_all_comm_overlap_buffers();

// Throws kValue, naming the id, if there is no such buffer (0: no buffer was given).
TORCH_OVERLAP_API std::shared_ptr<CommOverlapCore> find_comm_overlap_buffer(std::string_view op,
                                                                            int64_t id);

struct CommOverlapEntry {
  std::string comm;
  CommOverlapConfig config;
  int64_t holds = 0;
};
TORCH_OVERLAP_API std::map<int64_t, CommOverlapEntry> comm_overlap_buffers();

}  // namespace torch_overlap
