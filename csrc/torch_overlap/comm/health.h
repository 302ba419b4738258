#pragma once

#include <optional>
#include <string>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/call_record.h"

namespace torch_overlap {

// How a communicator of this process is, as far as its own calls tell. Asks no device and no peer.
struct CommHealth {
  std::shared_ptr<const CommRecord> comm;
  // "active", "late" (an operation is older than its timeout), "failed", "aborted"
  std::string state;
  size_t pending = 0;  // operations that were issued and have not ended; 0 if none is recorded
  CallRecordPtr oldest;
  double oldest_age_seconds = 0;

  bool is_healthy() const { return state == "active"; }
};

// All communicators that are alive and not finalized, in the order in which they were made.
// Threads: any. Operations are those that the process's flight recorder still holds.
TORCH_OVERLAP_API std::vector<CommHealth> health();

// {"healthy": bool, "communicators": [...]} of the above.
TORCH_OVERLAP_API std::string health_json();

}  // namespace torch_overlap
