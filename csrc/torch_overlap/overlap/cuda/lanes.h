#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <optional>
#include <vector>

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/stream.h"
#include "torch_overlap/overlap/lanes.h"

namespace torch_overlap::cuda {

// Lanes on a CUDA device: streams, forked from the caller's and joined to it by events when they
// are used. Compute lane 0 is the caller's own stream unless a priority is asked for. Captures get
// streams of their own: one that a capture took in stays in it until that capture ends.
class CudaLanes final : public Lanes {
 public:
  CudaLanes(c10::DeviceIndex device, const LaneOptions& options);
  ~CudaLanes() override;

  void enter() override;
  void leave() override;
  void fork() override;
  void join() override;
  void cancel() noexcept override;
  void run(int lane, std::string_view name, std::function<void()> work) override;
  Mark mark(int lane) override;
  void after(int lane, Mark mark) override;
  void wait(int lane, std::shared_ptr<WorkPtr> work) override;

 private:
  struct Lane {
    OwnedStream stream;
    bool forked = false;
  };
  struct Set {
    unsigned long long capture = 0;  // the last that it served; 0: none, it is for eager calls
    std::vector<std::unique_ptr<Lane>> lanes;
  };
  Set& set_for(const Capture& capture);
  // Behind the fork.
  cudaStream_t stream_of(int lane);
  bool is_caller(int lane) const { return lane == 0 && shares_caller_; }
  cudaEvent_t next_event();

  const c10::DeviceIndex device_;
  const LaneOptions options_;
  const bool shares_caller_;
  std::vector<std::unique_ptr<Set>> sets_;
  // Of the operation that is issued.
  Set* current_ = nullptr;
  std::optional<c10::cuda::CUDAStream> caller_;
  cudaEvent_t forked_ = nullptr;
  std::vector<cudaEvent_t> events_;
  size_t used_ = 0;
  // The end of the operation before, of eager ones and of those of the last capture.
  struct End {
    cudaEvent_t event = nullptr;
    bool is_recorded = false;
    cudaStream_t stream = nullptr;
    unsigned long long capture = 0;
  };
  End eager_end_;
  End captured_end_;
};

}  // namespace torch_overlap::cuda
