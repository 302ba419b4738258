#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/Event.h>

#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/c10d/convert.h"
#include "torch_overlap/comm/work.h"

namespace torch_overlap {

class WorkWrapper;

// The event of one operation in a profile, from its call to its end: "torch_overlap:<op>", with its
// inputs for their shapes. Null if no profiler is active.
using Span = std::shared_ptr<at::RecordFunction>;
TORCH_OVERLAP_API Span begin_span(c10d::OpType type, at::ArrayRef<at::Tensor> inputs);

// The contents of a WorkWrapper.
struct WorkParts {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::vector<WorkPtr> works{};       // in order of issue; several if the operation is coalesced
  std::vector<at::Tensor> outputs{};  // returned by result() and the future
  std::vector<CopyBack> copies{};     // made once, after all works
  // The operations that were coalesced into this one. Their works are in `works`; each member
  // finishes its own outputs.
  std::vector<c10::intrusive_ptr<WorkWrapper>> members{};
  bool blocks_host = false;  // wait() blocks the host on every device (barrier)
  Span span{};
  int rank = -1;
  int source = -1;  // source rank of a recv
  uint64_t sequence = 0;
};

// Returns the parts of an operation that is about to be issued. Its event in a profile has begun.
TORCH_OVERLAP_API WorkParts begin_work(c10d::OpType type, at::ArrayRef<at::Tensor> inputs,
                                       std::vector<at::Tensor> outputs = {});
// Ends the event of an operation that was issued.
void end_span(WorkParts& parts);

// c10d's handle of a TorchWork. On CPU wait() blocks the thread; on CUDA it orders the current
// stream, and blocks the thread only with a timeout or for a barrier. isCompleted() queries the
// device.
//
// Threads: any. Lifetime: it keeps its TorchWorks alive, which keep their tensors until they are
// done.
class TORCH_OVERLAP_API WorkWrapper final : public c10d::Work {
 public:
  explicit WorkWrapper(WorkParts parts);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override { return parts_.outputs; }
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void blockCurrentStream() override;
  uint64_t getSequencenumber() const override { return parts_.sequence; }

  // A future of the list of outputs. CPU: completes with the operation, with its error if it
  // failed. CUDA: already completed; a waiter orders its own stream after the operation.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  // A future of c10d::WorkResult as a number. CPU only.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;

 private:
  using Future = c10::ivalue::Future;
  // Returns the stream of the last work; nullopt on CPU.
  std::optional<c10::Stream> stream() const;
  // Implements wait(), without translating errors.
  void finish(std::chrono::milliseconds timeout);
  // Called after all works. The first call makes the copies; later calls order the stream after
  // them.
  void finish_outputs();
  c10::intrusive_ptr<Future> stream_future(const c10::Stream& stream);

  WorkParts parts_;
  std::once_flag copied_;
  std::optional<c10::Event> copies_event_;  // CUDA: recorded after the copies on the works' stream
  c10::intrusive_ptr<Future> future_;       // guarded by mutex_
  c10::intrusive_ptr<Future> future_result_;  // guarded by mutex_
};

}  // namespace torch_overlap
