#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <chrono>
#include <memory>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/options.h"
#include "torch_overlap/comm/reduce_op.h"

namespace torch_overlap {

class SymmetricMemory;

// The operations as users name them (hooks, logs and errors speak of these).
enum class OpName : uint8_t {
  send,
  recv,
  broadcast,
  all_reduce,
  all_reduce_rms_norm,
  reduce,
  all_gather,
  all_gather_v,
  all_gather_single,
  reduce_scatter,
  reduce_scatter_v,
  reduce_scatter_single,
  all_to_all,
  all_to_all_single,
  all_to_all_v_single,
  barrier,
  scatter,
  gather,
  gather_single,
  batch_op_issue,
  split,
  new_window,
  finalize,
  put,
  signal,
  wait_signal,
};

inline constexpr size_t kOpNames = static_cast<size_t>(OpName::wait_signal) + 1;

TORCH_OVERLAP_API std::string_view to_string(OpName name);

// One tensor for each rank, in rank order. The parts may differ in size, and may be empty.
// `flat` is defined when the parts lie one behind the other in one contiguous tensor: a backend
// moves that in one piece. Equal parts of a flat tensor need no `parts` at all.
struct Blocks {
  at::Tensor flat;
  std::vector<at::Tensor> parts;

  bool empty() const { return !flat.defined() && parts.empty(); }
  // The parts are equal in size and `flat` holds them.
  bool is_uniform_flat() const { return flat.defined() && parts.empty(); }
  // The part of `rank` among `size` ranks.
  TORCH_OVERLAP_API at::Tensor part(int rank, int size) const;
  // All parts, made from `flat` where they are not listed.
  TORCH_OVERLAP_API std::vector<at::Tensor> all(int size) const;
};

class CallRecord;

// The `src` of a receive that takes the message of whichever rank sends first.
inline constexpr int kAnySource = -1;

struct P2POp {
  enum class Type : uint8_t { SEND, RECV };
  Type type;
  at::Tensor tensor;
  int peer;  // kAnySource: a receive from any other rank
  // Messages between two ranks match in order of issue among those of the same tag.
  int tag = 0;
};

// The things that backends do. Each user-level operation is one of them.
enum class Primitive : uint8_t {
  p2p,             // ops: all at once, in any order, none waits for another
  broadcast,       // tensor (in place), root
  all_reduce,      // tensor (in place), reduce_op
  reduce,          // tensor (in place at root), reduce_op, root
  all_gather,      // tensor -> out
  reduce_scatter,  // in -> tensor, reduce_op
  all_to_all,      // in -> out
  barrier,         //
  scatter,         // in (root only) -> tensor, root
  gather,          // tensor -> out (root only), root
  put,             // tensor -> window of rank root, from byte offset on
  signal,          // window, root
  wait_signal,     // window, root: the rank whose signal is waited for, ticket
};

// All ranks issue it. The others concern one rank or two.
constexpr bool is_collective(Primitive primitive) {
  return primitive != Primitive::p2p && primitive != Primitive::put &&
         primitive != Primitive::signal && primitive != Primitive::wait_signal;
}

// As errors name it: "send/recv" for p2p.
TORCH_OVERLAP_API std::string_view to_string(Primitive primitive);

// What comes with the sum of an all_reduce_rms_norm, row by row of the tensor, that is, along its
// last dimension: residual_out = residual + sum + bias, rounded once where the backend can, and the
// tensor becomes residual_out divided by its root mean square, times weight.
struct RmsNorm {
  at::Tensor residual;      // of the tensor's shape
  at::Tensor residual_out;  // the same; may be `residual` itself
  at::Tensor weight;        // one for each element of a row
  at::Tensor bias;          // the same, or undefined
  double eps = 0;           // added to the mean of squares
};

// One validated operation: the whole problem in one value. Tensors are contiguous (a flat one, or
// each part), on the communicator's device, and of one dtype; sizes fit; ranks are in range.
struct Call {
  OpName name;
  Primitive primitive;
  at::Tensor tensor;
  Blocks in;
  Blocks out;
  std::vector<P2POp> p2p;
  ReduceOp reduce_op;
  std::shared_ptr<const RmsNorm> norm;  // of an all_reduce whose backend has_rms_norm()
  int root = -1;
  bool is_compared = false;                 // with what the other ranks do: see mismatch.h
  std::shared_ptr<SymmetricMemory> window;  // lives until the operation is done
  int64_t offset = 0;
  uint64_t ticket = 0;  // which signal to wait for, counted from 1; 0: the next, when it runs
  bool async_op = false;
  bool high_priority = false;
  DirectMode direct = DirectMode::off;  // for backends that have both ways
  Milliseconds timeout{0};              // never 0: the operation's, else the communicator's
  uint64_t id = 0;                      // counts the operations of the process
  // Number of the operation on its communicator: among the collectives, where it is the same on all
  // ranks, or among the sends and receives.
  uint64_t sequence = 0;
  std::string_view comm;  // the communicator's name, for errors; outlives the call
  // What the flight recorder knows of it, kept up to date by who runs it; null: nothing.
  std::shared_ptr<CallRecord> record;

  // Every tensor that must live until the operation is done.
  using Tensors = c10::SmallVector<at::Tensor, 4>;
  TORCH_OVERLAP_API Tensors tensors() const;
  template <typename Visit>
  void for_each_tensor(const Visit& visit) const;
  // Counts up the versions of the tensors that the call writes on `rank`, as every operation in
  // place does, so that autograd finds out when one of them was saved for a backward.
  TORCH_OVERLAP_API void bump_versions(int rank) const;
  // "all_reduce #12 on 'tp'", with the number on its communicator: how errors name this call.
  TORCH_OVERLAP_API std::string describe() const;
};

template <typename Visit>
void Call::for_each_tensor(const Visit& visit) const {
  const auto visit_defined = [&visit](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
  };
  const auto visit_blocks = [&](const Blocks& blocks) {
    // `flat` of listed parts is a view of the storage of the first part: both are visited, because
    // the parts may be views of a buffer that nobody else holds.
    visit_defined(blocks.flat);
    for (const auto& part : blocks.parts) visit_defined(part);
  };
  visit_defined(tensor);
  visit_blocks(in);
  visit_blocks(out);
  for (const auto& op : p2p) visit_defined(op.tensor);
  if (norm) {
    for (const auto* one : {&norm->residual, &norm->residual_out, &norm->weight, &norm->bias}) {
      visit_defined(*one);
    }
  }
  if (const auto* factor = std::get_if<at::Tensor>(&reduce_op.factor())) visit_defined(*factor);
}

}  // namespace torch_overlap
