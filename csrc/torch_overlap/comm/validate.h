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

// Name that errors use for an argument, or for an entry of a list. No string is built before an
// error occurs.
struct ArgumentName {
  // NOLINTNEXTLINE(google-explicit-constructor,hicpp-explicit-conversions)
  ArgumentName(std::string_view list, int64_t index = -1) : list(list), index(index) {}
  // NOLINTNEXTLINE(google-explicit-constructor,hicpp-explicit-conversions)
  ArgumentName(const char* name) : ArgumentName(std::string_view(name)) {}

  std::string_view list;
  int64_t index;  // -1: not an entry of a list

  friend std::ostream& operator<<(std::ostream& out, const ArgumentName& name) {
    out << name.list;
    return name.index < 0 ? out : out << '[' << name.index << ']';
  }
};

// The properties that an operation's arguments are checked against. Errors name the operation.
struct Checker {
  std::string_view op;
  c10::Device device;
  int rank;
  int size;
  std::shared_ptr<const Membership> members = nullptr;  // the communicator's members
  bool moves_data = true;                               // if false, tensors need no memory

  // Throws unless the tensor is defined, dense, contiguous, on the communicator's device, and has
  // memory (if moves_data).
  void tensor(const at::Tensor& tensor, const ArgumentName& what) const;
  // Same as tensor(); also throws unless the dtype equals that of `like`.
  void tensor_like(const at::Tensor& tensor, const at::Tensor& like,
                   const ArgumentName& what) const;
  // Throws unless the list has one tensor per rank.
  void list(const std::vector<at::Tensor>& tensors, const at::Tensor& like,
            std::string_view what) const;
  void rank_in_range(int rank, std::string_view what) const;
  // Throws if the two tensors share memory; accepts the same memory if `allow_same`.
  void no_overlap(const at::Tensor& read, const at::Tensor& written, bool allow_same,
                  std::string_view what) const;
  // Throws if a received tensor shares memory with any other tensor of the batch.
  void recv_no_overlap(const std::vector<P2POp>& ops) const;
  // Throws if two outputs share memory.
  void outputs_no_overlap(const std::vector<at::Tensor>& outputs, std::string_view what) const;
  void numel(const at::Tensor& tensor, int64_t expected, const ArgumentName& what) const;
  // Throws unless the number of elements equals that of all ranks' `part` together. Errors call
  // that `part_name`.
  void numel_of_all(const at::Tensor& tensor, const at::Tensor& part, std::string_view what,
                    std::string_view part_name) const;
  // Runs check_reduction(), and checks a factor that is a tensor. `tensor` is the one that is
  // written.
  void reduction(const at::Tensor& tensor, const ReduceOp& reduce_op) const;

 private:
  struct Use {
    const at::Tensor& tensor;
    bool is_written;
  };
  // `which` describes the tensors in two words.
  void written_no_overlap(const std::vector<Use>& uses,
                          const std::pair<std::string_view, std::string_view>& which,
                          std::string_view others) const;
};

// Throws unless the (dtype, op) pair is supported. `op` names the operation.
void check_reduction(std::string_view op, at::ScalarType dtype, const ReduceOp& reduce_op);

// Returns the listed parts; sets `flat` if they are consecutive in one tensor.
RankTensors rank_tensors_of(const std::vector<at::Tensor>& parts);

}  // namespace torch_overlap
