#pragma once

#include <map>
#include <memory>

#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/overlap/transport.h"

namespace torch_overlap {

// Through a communicator: sends and receives, for ranks that cannot reach each other's memory.
class CommTransport final : public Transport {
 public:
  explicit CommTransport(const std::shared_ptr<TorchComm>& comm) : comm_(comm) {}

  std::string_view name() const override { return "send and receive"; }
  bool is_direct() const override { return false; }
  // A receive begins when its rank is ready for it: nobody is overrun.
  void begin(const Begin&) override { arriving_.clear(); }
  void end() override { arriving_.clear(); }
  void exchange(Lanes& lanes, int lane, const Move& move) override;
  void arrived(Lanes& lanes, int lane, const std::vector<int>& flags) override;
  void post(Lanes& lanes, int lane, int flag) override;
  at::Tensor peer(int rank, int64_t at, c10::IntArrayRef sizes,
                  at::ScalarType dtype) const override;

 private:
  const std::weak_ptr<TorchComm> comm_;  // which may keep the channel
  struct Arrival {
    Lanes::Mark started;            // behind the start of `work` on its lane
    std::shared_ptr<WorkPtr> work;  // made when the lane comes to it
  };
  std::map<int, Arrival> arriving_;  // by flag: what brings that which it tells of
};

}  // namespace torch_overlap
