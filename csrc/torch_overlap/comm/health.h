#pragma once

#include <string>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/call_record.h"

namespace torch_overlap {

// State of a communicator of this process, as far as its own calls show. Queries no device and no
// peer.
struct CommHealth {
  std::shared_ptr<const CommRecord> comm;
  // "active", "late" (an operation is older than its timeout), "failed", "aborted"
  std::string state;
  size_t pending = 0;  // recorded operations that were issued and have not ended
  CallRecordPtr oldest;
  double oldest_age_seconds = 0;

  bool is_healthy() const { return state == "active"; }
};

// Returns all communicators that are alive and not finalized, in the order in which they were made.
// Operations are those that the process's flight recorder still holds. Threads: any.
TORCH_OVERLAP_API std::vector<CommHealth> health();

// Returns health() as JSON: {"healthy": bool, "communicators": [...]}.
TORCH_OVERLAP_API std::string health_json();

}  // namespace torch_overlap
