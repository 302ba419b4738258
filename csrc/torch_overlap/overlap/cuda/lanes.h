#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "torch_overlap/common/cuda/side_streams.h"
#include "torch_overlap/overlap/cuda/ends.h"
#include "torch_overlap/overlap/lanes.h"

namespace torch_overlap::cuda {

// Lanes on a CUDA device: streams beside the caller's. Compute lane 0 is the caller's own stream
// unless a priority is asked for.
class CudaLanes final : public Lanes {
 public:
  CudaLanes(c10::DeviceIndex device, const LaneOptions& options);
  ~CudaLanes() override;

  void enter() override;
  void leave() override;
  void drain(std::chrono::milliseconds timeout) noexcept override;
  void keep(const std::vector<std::shared_ptr<void>>& what) override { kept_ = what; }
  void fork(bool as_one) override;
  bool are_one() const override { return as_one_; }
  bool are_captured() const override { return streams_.are_captured(); }
  void join() override;
  void cancel() noexcept override;
  void run(int lane, std::string_view name, std::function<void()> work) override;
  Mark mark(int lane) override;
  void after(int lane, Mark mark) override;
  void settle(int lane) override;
  void wait(int lane, std::shared_ptr<WorkPtr> work) override;

 private:
  // Behind the fork.
  c10::cuda::CUDAStream stream_of(int lane);
  bool is_callers(int lane) const { return as_one_ || (lane == 0 && shares_caller_); }

  const c10::DeviceIndex device_;
  const bool shares_caller_;
  SideStreams streams_;  // of lane 0 too, which shared lanes leave idle
  bool as_one_ = false;  // on the caller's stream
  class Hold;
  std::vector<std::shared_ptr<void>> kept_;
  std::unique_ptr<Ends> ends_;
};

}  // namespace torch_overlap::cuda
