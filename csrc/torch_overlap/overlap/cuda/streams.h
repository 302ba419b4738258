#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "torch_overlap/common/cuda/side_streams.h"
#include "torch_overlap/overlap/cuda/last_op_event.h"
#include "torch_overlap/overlap/streams.h"

namespace torch_overlap::cuda {

// OverlapStreams on a CUDA device: streams in addition to the caller's. Compute stream 0 is the
// caller's own stream unless a priority is requested.
class CudaStreams final : public OverlapStreams {
 public:
  CudaStreams(c10::DeviceIndex device, const StreamOptions& options);
  ~CudaStreams() override;

  void wait_for_previous() override;
  void record_last() override;
  void drain(std::chrono::milliseconds timeout) noexcept override;
  void keep(const std::vector<std::shared_ptr<void>>& what) override { retained_ = what; }
  void fork(bool single_stream) override;
  bool is_single_stream() const override { return single_stream_; }
  bool is_captured() const override { return streams_.is_captured(); }
  void join() override;
  void cancel() noexcept override;
  void run(int stream, std::string_view name, std::function<void()> work) override;
  Mark mark(int stream) override;
  void after(int stream, Mark mark) override;
  void join_stream(int stream) override;
  void wait(int stream, std::shared_ptr<WorkPtr> work) override;

 private:
  // Valid after the fork.
  c10::cuda::CUDAStream cuda_stream(int stream);
  bool is_callers(int stream) const { return single_stream_ || (stream == 0 && shares_caller_); }

  const c10::DeviceIndex device_;
  const bool shares_caller_;
  SideStreams streams_;         // Number 0 is idle if stream 0 is the caller's.
  bool single_stream_ = false;  // All streams are the caller's stream.
  class StreamResources;
  std::vector<std::shared_ptr<void>> retained_;
  std::unique_ptr<LastOpEvent> last_op_;
};

}  // namespace torch_overlap::cuda
