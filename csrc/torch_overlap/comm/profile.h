#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <optional>

#include "torch_overlap/comm/call.h"
#include "torch_overlap/comm/call_record.h"

namespace torch_overlap {

// The events of one call in a profile, while it is issued: "TorchComm::<op>" with the tensors that
// the call reads, for their shapes, and in it torch's "record_param_comms", from which trace tools
// take the operation, the communicator and the number of elements. Kernels that are launched
// meanwhile carry the same data. Costs one check if no profiler is active.
class ProfileScope {
 public:
  // `call` has its sequence number.
  ProfileScope(const Call& call, const CommRecord& comm) : span_(at::RecordScope::FUNCTION) {
    if (__builtin_expect(span_.isActive(), 0)) begin(call, comm);
  }

 private:
  void begin(const Call& call, const CommRecord& comm);

  at::RecordFunction span_;
  std::optional<c10::DebugInfoGuard> info_;
  std::optional<at::RecordFunction> params_;
};

}  // namespace torch_overlap
