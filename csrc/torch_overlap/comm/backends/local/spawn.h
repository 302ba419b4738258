#pragma once

#include <functional>
#include <memory>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {

// Runs `body` on `size` ranks and returns when all have ended. Each rank is a thread of this
// process with its TorchComm of one new `local` communicator. A communicator that `body` leaves
// open is finalized. A rank that throws aborts its TorchComm, so that the others do not wait for
// it. Throws kRuntime with the messages of all failed ranks, in rank order, if any rank failed.
//
// `options` are those of TorchComm::create, except that the store is created here, and that
// abort_process_on_timeout_or_error is false unless it is set, because the ranks share the process.
//
//   run_local_ranks(4, [](const std::shared_ptr<TorchComm>& comm) {
//     at::Tensor x = at::full({8}, comm->rank());
//     comm->all_reduce(x, RedOpType::SUM, /*async_op=*/false);
//   });
TORCH_OVERLAP_API void run_local_ranks(
    int size, const std::function<void(const std::shared_ptr<TorchComm>&)>& body,
    CommOptions options = {});

}  // namespace torch_overlap
