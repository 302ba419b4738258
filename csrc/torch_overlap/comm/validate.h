#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <string_view>
#include <vector>

#include "torch_overlap/comm/call.h"

namespace torch_overlap {

struct Membership;

// What an operation's arguments are checked against; the errors name the operation.
struct Checker {
  std::string_view op;
  c10::Device device;
  int rank;
  int size;
  std::shared_ptr<const Membership> members = nullptr;  // whose these are
  bool moves_data = true;                               // else tensors need no memory

  // Defined, dense, contiguous, on the communicator's device, with memory of its own.
  void tensor(const at::Tensor& tensor, std::string_view what) const;
  // Also of `like`'s dtype.
  void tensor_like(const at::Tensor& tensor, const at::Tensor& like, std::string_view what) const;
  // One tensor for each rank.
  void list(const std::vector<at::Tensor>& tensors, const at::Tensor& like,
            std::string_view what) const;
  void rank_in_range(int rank, std::string_view what) const;
  // The two share no memory; or, if `same_is_fine`, are the same memory.
  void apart(const at::Tensor& read, const at::Tensor& written, bool same_is_fine,
             std::string_view what) const;
  // What is received shares no memory with anything else of the batch.
  void received_apart(const std::vector<P2POp>& ops) const;
  // No two outputs share memory.
  void outputs_apart(const std::vector<at::Tensor>& outputs, std::string_view what) const;
  void numel(const at::Tensor& tensor, int64_t expected, std::string_view what) const;
  // check_reduction(), and a factor that is a tensor fits. `tensor` is written.
  void reduction(const at::Tensor& tensor, const ReduceOp& op) const;

 private:
  struct Use {
    const at::Tensor& tensor;
    bool is_written;
  };
  void written_apart(const std::vector<Use>& uses, std::string_view what) const;
};

// The (dtype, op) pair means something. `op` names the operation.
void check_reduction(std::string_view op, at::ScalarType dtype, const ReduceOp& reduce_op);

// Parts that are listed; finds out whether they lie one behind the other in one tensor.
Blocks blocks_of(const std::vector<at::Tensor>& parts);

}  // namespace torch_overlap
