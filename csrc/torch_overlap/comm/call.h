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

// The operations as users name them, which hooks, logs and errors use.
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

inline constexpr size_t kNumOpNames = static_cast<size_t>(OpName::wait_signal) + 1;

TORCH_OVERLAP_API std::string_view to_string(OpName name);

// One tensor per rank, in rank order. The parts may differ in size, and may be empty. `flat` is
// defined if the parts are consecutive in one contiguous tensor, which a backend moves in one
// piece. Equal parts of a flat tensor need no `parts`.
struct RankTensors {
  at::Tensor flat;
  std::vector<at::Tensor> parts;

  bool empty() const { return !flat.defined() && parts.empty(); }
  // True if the parts are equal in size and `flat` holds them.
  bool is_uniform_flat() const { return flat.defined() && parts.empty(); }
  // Returns the part of `rank` among `size` ranks.
  TORCH_OVERLAP_API at::Tensor part(int rank, int size) const;
  // Returns all parts, as views of `flat` if they are not listed.
  TORCH_OVERLAP_API std::vector<at::Tensor> all(int size) const;
};

class CallRecord;

// The `src` of a receive that accepts the message of whichever rank sends first.
inline constexpr int kAnySource = -1;

struct P2POp {
  enum class Type : uint8_t { SEND, RECV };
  Type type;
  at::Tensor tensor;
  int peer;  // kAnySource: a receive from any other rank
  // Messages between two ranks match in order of issue among those of the same tag.
  int tag = 0;
};

// The primitives that backends implement. Each user-level operation is one of them.
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
  put,             // tensor -> window of rank peer, from byte offset on
  signal,          // window, peer
  wait_signal,     // window, peer: the rank whose signal is waited for, ticket
};

// True if all ranks issue the primitive. The others concern one rank or two.
constexpr bool is_collective(Primitive primitive) {
  return primitive != Primitive::p2p && primitive != Primitive::put &&
         primitive != Primitive::signal && primitive != Primitive::wait_signal;
}

// Returns the name that errors use: "send/recv" for p2p.
TORCH_OVERLAP_API std::string_view to_string(Primitive primitive);

// Epilogue of an all_reduce_rms_norm, for each row of the tensor, that is, along its last
// dimension: residual_out = residual + sum + bias, rounded once if the backend supports it, and the
// tensor becomes residual_out divided by its root mean square, times weight.
struct RmsNorm {
  // Quantization of that result, by backends whose quantizes_rms_norm() is true.
  struct Quantization {
    NormScaling scaling = NormScaling::none;
    at::Tensor scale;        // NormScaling::tensor: fp32 [1], the factor of the values
    at::Tensor data;         // e4m3, shape of the tensor
    at::Tensor scale_inv;    // fp32; tensor: [1]; row: [rows]; block: [blocks of a row, rows]
    bool keeps_rows = true;  // if false, the contents of the tensor are then undefined
  };

  at::Tensor residual;      // same shape as the tensor
  at::Tensor residual_out;  // same shape; may be `residual` itself
  at::Tensor weight;        // one element per element of a row
  at::Tensor bias;          // same shape as the weight, or undefined
  double eps = 0;           // added to the mean of squares
  at::Tensor terms{};       // this rank's terms of the sum; undefined: the tensor holds them
  Quantization quantization{};

  // Calls `visit` with each tensor, which may be undefined.
  template <typename Self, typename Visit>
  static void for_each_tensor(Self& self, const Visit& visit) {
    for (auto* one :
         {&self.residual, &self.residual_out, &self.weight, &self.bias, &self.terms,
          &self.quantization.scale, &self.quantization.data, &self.quantization.scale_inv}) {
      visit(*one);
    }
  }
};

// A kernel that sums and normalizes. `unprepared`: the first call prepares it with the other ranks,
// or finds that there is none.
enum class NormKernel : uint8_t { none, unprepared, ready };

// One validated operation, with everything that a backend needs to run it. Tensors are contiguous
// (the flat one, or each part), on the communicator's device, and of one dtype; sizes match; ranks
// are in range.
struct Call {
  OpName name;
  Primitive primitive;
  at::Tensor tensor;
  RankTensors in;
  RankTensors out;
  std::vector<P2POp> p2p;
  ReduceOp reduce_op;
  std::shared_ptr<const RmsNorm> norm;      // for an all_reduce whose backend has_rms_norm()
  int root = -1;                            // of the primitives that have one
  int peer = -1;                            // of a send or recv, and of the operations of windows
  bool bumps_versions = true;               // see OpOptions
  bool is_compared = false;                 // with the calls of the other ranks: see mismatch.h
  std::shared_ptr<SymmetricMemory> window;  // lives until the operation is done
  int64_t offset = 0;
  uint64_t ticket = 0;  // number of the signal to wait for, from 1; 0: the next one at run time
  bool async_op = false;
  bool high_priority = false;
  CollectiveMode custom_collectives = CollectiveMode::off;  // if the backend has them
  Milliseconds timeout{0};  // never 0 once issued: the operation's, otherwise the communicator's
  uint64_t id = 0;          // number of the operation in the process
  // Number of the operation on its communicator. Collectives are counted together, so the number is
  // equal on all ranks; sends and receives are counted separately, and so are the operations of
  // windows.
  uint64_t sequence = 0;
  std::string_view comm;  // name of the communicator, for errors; outlives the call
  // The flight recorder's entry, updated by the thread that runs the call. Null if the call is not
  // recorded.
  std::shared_ptr<CallRecord> record;

  // Returns every tensor that must live until the operation is done.
  using Tensors = c10::SmallVector<at::Tensor, 4>;
  TORCH_OVERLAP_API Tensors tensors() const;
  template <typename Visit>
  void for_each_tensor(const Visit& visit) const;
  // Increments the version counters of the tensors that the call writes on `rank`, as every
  // in-place operation does, so that autograd detects if one of them was saved for a backward.
  TORCH_OVERLAP_API void bump_versions(int rank) const;
  // Replaces tensors that are part of an autograd graph by aliases that are not. An operation keeps
  // its memory until it is done, but must not keep the graph: a later capture would find nodes of
  // another stream in it.
  TORCH_OVERLAP_API void detach_tensors();
  // Returns the name that errors use for this call, with its number on the communicator:
  // "all_reduce #12 on 'tp'".
  TORCH_OVERLAP_API std::string describe() const;
};

template <typename Visit>
void Call::for_each_tensor(const Visit& visit) const {
  const auto visit_defined = [&visit](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
  };
  const auto visit_rank_tensors = [&](const RankTensors& blocks) {
    // If the parts are listed, `flat` is a view of the first part's storage. Both are visited,
    // because the parts may be views of a buffer that nothing else keeps alive.
    visit_defined(blocks.flat);
    for (const auto& part : blocks.parts) visit_defined(part);
  };
  visit_defined(tensor);
  visit_rank_tensors(in);
  visit_rank_tensors(out);
  for (const auto& op : p2p) visit_defined(op.tensor);
  if (norm) RmsNorm::for_each_tensor(*norm, visit_defined);
  if (const auto* factor = std::get_if<at::Tensor>(&reduce_op.factor())) visit_defined(*factor);
}

}  // namespace torch_overlap
