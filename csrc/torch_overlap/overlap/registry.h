#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "torch_overlap/base/export.h"
#include "torch_overlap/overlap/comm_overlap.h"

// Buffers by number, for operators, which cannot take objects. Numbers are positive, unique in the
// process, and never used again. Threads: any.
namespace torch_overlap {

// Collective. The same communicator and configuration give the buffer that is there, and its
// number: it is then held once more. Equal means equal in every field; one from before a
// reconfigure() is none.
TORCH_OVERLAP_API int64_t create_comm_overlap_buffer(const std::shared_ptr<TorchComm>& comm,
                                                     const CommOverlapConfig& config);
// Takes one hold back; the last ends the buffer. A kValue error names an unknown or dead number.
TORCH_OVERLAP_API void destroy_comm_overlap_buffer(int64_t id);
// Ends all that are left, the youngest first, however often they are held.
TORCH_OVERLAP_API void destroy_all_comm_overlap_buffers();

// A kValue error names the number if there is none (0: no buffer was given).
TORCH_OVERLAP_API std::shared_ptr<CommOverlapCore> find_comm_overlap_buffer(std::string_view op,
                                                                            int64_t id);

struct CommOverlapEntry {
  std::string comm;
  CommOverlapConfig config;
  int64_t holds = 0;
};
TORCH_OVERLAP_API std::map<int64_t, CommOverlapEntry> comm_overlap_buffers();

}  // namespace torch_overlap
