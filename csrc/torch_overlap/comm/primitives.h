#pragma once

#include "torch_overlap/comm/call.h"

namespace torch_overlap {

// The operations of a backend, as functions on validated tensors. An object of this class lives for
// one operation (or longer): it holds the communicator, the stream or thread that it runs on, and
// the deadline. `run` is the only dispatch from a Call to its function.
//
// Each function returns once the operation is issued (CUDA: on the stream) or done (host). Data
// movement supports any dtype. Reductions support what validate.h accepts; those that a backend
// cannot do natively are composed of data movement (composed.h).
class TORCH_OVERLAP_API Primitives {
 public:
  Primitives(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~Primitives() = default;
  void run(const Call& call);

  int rank() const { return rank_; }
  int size() const { return size_; }

  virtual void p2p(const std::vector<P2POp>& ops) = 0;
  virtual void broadcast(const at::Tensor& tensor, int root) = 0;
  virtual void all_reduce(const at::Tensor& tensor, const ReduceOp& op) = 0;
  virtual void reduce(const at::Tensor& tensor, const ReduceOp& op, int root) = 0;
  virtual void all_gather(const RankTensors& out, const at::Tensor& tensor) = 0;
  virtual void reduce_scatter(const at::Tensor& tensor, const RankTensors& in,
                              const ReduceOp& op) = 0;
  // `in` and `out` share no memory.
  virtual void all_to_all(const RankTensors& out, const RankTensors& in) = 0;
  virtual void barrier() = 0;
  virtual void scatter(const at::Tensor& tensor, const RankTensors& in, int root) = 0;
  virtual void gather(const RankTensors& out, const at::Tensor& tensor, int root) = 0;
  virtual void put(SymmetricMemory& window, const at::Tensor& tensor, int dst, int64_t offset) = 0;
  virtual void signal(SymmetricMemory& window, int dst) = 0;
  virtual void wait_signal(SymmetricMemory& window, int src, uint64_t ticket) = 0;

 private:
  int rank_;
  int size_;
};

}  // namespace torch_overlap
