#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <ostream>
#include <string_view>
#include <utility>
#include <vector>

#include "torch_overlap/comm/call.h"

namespace torch_overlap {

struct Membership;

// What errors call an argument, or an entry of a list. No text is made of it before there is one.
struct ArgumentName {
  // NOLINTNEXTLINE(google-explicit-constructor,hicpp-explicit-conversions)
  ArgumentName(std::string_view list, int64_t index = -1) : list(list), index(index) {}
  // NOLINTNEXTLINE(google-explicit-constructor,hicpp-explicit-conversions)
  ArgumentName(const char* name) : ArgumentName(std::string_view(name)) {}

  std::string_view list;
  int64_t index;  // -1: it is no entry

  friend std::ostream& operator<<(std::ostream& out, const ArgumentName& name) {
    out << name.list;
    return name.index < 0 ? out : out << '[' << name.index << ']';
  }
};

// What an operation's arguments are checked against; the errors name the operation.
struct Checker {
  std::string_view op;
  c10::Device device;
  int rank;
  int size;
  std::shared_ptr<const Membership> members = nullptr;  // whose these are
  bool moves_data = true;                               // else tensors need no memory

  // Defined, dense, contiguous, on the communicator's device, with memory of its own.
  void tensor(const at::Tensor& tensor, const ArgumentName& what) const;
  // Also of `like`'s dtype.
  void tensor_like(const at::Tensor& tensor, const at::Tensor& like,
                   const ArgumentName& what) const;
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
  void numel(const at::Tensor& tensor, int64_t expected, const ArgumentName& what) const;
  // As many elements as all ranks' `part` together; `part_name` is how errors call that.
  void numel_of_all(const at::Tensor& tensor, const at::Tensor& part, std::string_view what,
                    std::string_view part_name) const;
  // check_reduction(), and a factor that is a tensor fits. `tensor` is written.
  void reduction(const at::Tensor& tensor, const ReduceOp& op) const;

 private:
  struct Use {
    const at::Tensor& tensor;
    bool is_written;
  };
  // `which` tensors, said in two words.
  void written_apart(const std::vector<Use>& uses,
                     const std::pair<std::string_view, std::string_view>& which,
                     std::string_view others) const;
};

// The (dtype, op) pair means something. `op` names the operation.
void check_reduction(std::string_view op, at::ScalarType dtype, const ReduceOp& reduce_op);

// Parts that are listed; finds out whether they lie one behind the other in one tensor.
Blocks blocks_of(const std::vector<at::Tensor>& parts);

}  // namespace torch_overlap
