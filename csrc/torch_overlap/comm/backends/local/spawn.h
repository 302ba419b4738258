#pragma once

#include <functional>
#include <memory>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {

// Runs `body` as `size` ranks, each a thread of this process with its end of one new `local`
// communicator, and returns when all have ended. A communicator that `body` leaves open is
// finalized. A rank that throws aborts its end, so that the others do not wait for it; the error
// thrown here (kRuntime) holds what every failed rank said, in rank order.
//
// `options`: as for TorchComm::create, but the store is made here, and
// abort_process_on_timeout_or_error is false unless it is set: the ranks share the process.
//
//   run_local_ranks(4, [](const std::shared_ptr<TorchComm>& comm) {
//     at::Tensor x = at::full({8}, comm->rank());
//     comm->all_reduce(x, RedOpType::SUM, /*async_op=*/false);
//   });
TORCH_OVERLAP_API void run_local_ranks(
    int size, const std::function<void(const std::shared_ptr<TorchComm>&)>& body,
    CommOptions options = {});

}  // namespace torch_overlap
