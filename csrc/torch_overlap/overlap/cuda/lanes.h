#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "torch_overlap/common/cuda/side_streams.h"
#include "torch_overlap/overlap/cuda/last_op_event.h"
#include "torch_overlap/overlap/lanes.h"

namespace torch_overlap::cuda {

// Lanes on a CUDA device: streams in addition to the caller's. Compute lane 0 is the caller's own
// stream unless a priority is requested.
class CudaLanes final : public Lanes {
 public:
  CudaLanes(c10::DeviceIndex device, const LaneOptions& options);
  ~CudaLanes() override;

  void enter() override;
  void leave() override;
  void drain(std::chrono::milliseconds timeout) noexcept override;
  void keep(const std::vector<std::shared_ptr<void>>& what) override { retained_ = what; }
  void fork(bool single_lane) override;
  bool is_single_lane() const override { return single_lane_; }
  bool is_captured() const override { return streams_.is_captured(); }
  void join() override;
  void cancel() noexcept override;
  void run(int lane, std::string_view name, std::function<void()> work) override;
  Mark mark(int lane) override;
  void after(int lane, Mark mark) override;
  void join_lane(int lane) override;
  void wait(int lane, std::shared_ptr<WorkPtr> work) override;

 private:
  // Valid after the fork.
  c10::cuda::CUDAStream stream_of(int lane);
  bool is_callers(int lane) const { return single_lane_ || (lane == 0 && shares_caller_); }

  const c10::DeviceIndex device_;
  const bool shares_caller_;
  SideStreams streams_;       // Includes lane 0, whose stream is idle if it shares the caller's.
  bool single_lane_ = false;  // All lanes are the caller's stream.
  class LaneResources;
  std::vector<std::shared_ptr<void>> retained_;
  std::unique_ptr<LastOpEvent> last_op_;
};

}  // namespace torch_overlap::cuda
