#pragma once

#include "torch_overlap/comm/primitives.h"

namespace torch_overlap {

// Computes the results listed in fake_backend.h, in place, on the current stream.
class FakePrimitives final : public Primitives {
 public:
  using Primitives::Primitives;

  void p2p(const std::vector<P2POp>& ops) override;
  void broadcast(const at::Tensor& tensor, int root) override {}
  void all_reduce(const at::Tensor& tensor, const ReduceOp& op) override;
  void reduce(const at::Tensor& tensor, const ReduceOp& op, int root) override;
  void all_gather(const RankTensors& out, const at::Tensor& tensor) override;
  void reduce_scatter(const at::Tensor& tensor, const RankTensors& in, const ReduceOp& op) override;
  void all_to_all(const RankTensors& out, const RankTensors& in) override;
  void barrier() override {}
  void scatter(const at::Tensor& tensor, const RankTensors& in, int root) override;
  void gather(const RankTensors& out, const at::Tensor& tensor, int root) override;
  void put(SymmetricMemory& window, const at::Tensor& tensor, int dst, int64_t offset) override;
  void signal(SymmetricMemory& window, int dst) override {}
  void wait_signal(SymmetricMemory& window, int src, uint64_t ticket) override {}
};

}  // namespace torch_overlap
