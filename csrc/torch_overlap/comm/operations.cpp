// The operations of TorchComm. Each validates its arguments, builds a Call, and issues it.

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/comm/validate.h"
#include "torch_overlap/common/memory_overlap.h"

namespace torch_overlap {
namespace {

Call make_call(OpName name, Primitive primitive, at::Tensor tensor = {}) {
  Call call;
  call.name = name;
  call.primitive = primitive;
  call.tensor = std::move(tensor);
  return call;
}

// Returns consecutive parts of `flat`, with `splits[r]` slices of dimension 0 for rank r.
RankTensors split_rank_tensors(const at::Tensor& flat, const std::vector<int64_t>& splits) {
  RankTensors blocks{flat, {}};
  if (splits.empty()) return blocks;
  const at::NoGradGuard no_grad;
  int64_t offset = 0;
  for (const int64_t length : splits) {
    blocks.parts.push_back(flat.narrow(0, offset, length));
    offset += length;
  }
  return blocks;
}

void check_splits(const Checker& check, const at::Tensor& tensor,
                  const std::vector<int64_t>& splits, std::string_view what) {
  if (splits.empty()) {
    TORCH_OVERLAP_CHECK(tensor.dim() > 0 && tensor.size(0) % check.size == 0, kValue, check.op,
                        ": expected ", what, " with a first dimension divisible by ", check.size,
                        ", got sizes ", tensor.sizes(), "; pass split sizes");
    return;
  }
  TORCH_OVERLAP_CHECK(static_cast<int>(splits.size()) == check.size, kValue, check.op,
                      ": expected ", check.size, " split sizes for ", what, ", got ",
                      splits.size());
  for (const int64_t split : splits) {
    TORCH_OVERLAP_CHECK(split >= 0, kValue, check.op, ": expected split sizes >= 0 for ", what,
                        ", got ", list_string(splits));
  }
  const int64_t total = std::accumulate(splits.begin(), splits.end(), int64_t{0});
  const int64_t rows = tensor.dim() == 0 ? -1 : tensor.size(0);
  TORCH_OVERLAP_CHECK(total == rows, kValue, check.op, ": expected split sizes that sum to ", rows,
                      ", the first dimension of ", what, ", got ", list_string(splits));
}

// Checks data movement between `blocks` and one tensor: the written side shares no memory with the
// read side, except that this rank's own part may be the tensor itself ("in place").
void check_in_place_or_no_overlap(const Checker& check, const at::Tensor& tensor,
                                  const RankTensors& blocks, std::string_view what) {
  if (blocks.flat.defined() && !memory_overlaps(blocks.flat, tensor)) return;
  for (int r = 0; r < check.size; ++r) {
    check.no_overlap(tensor, blocks.part(r, check.size), r == check.rank, what);
  }
}

// Same, and listed outputs also share no memory among themselves.
void check_outputs(const Checker& check, const at::Tensor& input, const RankTensors& outputs,
                   std::string_view what) {
  if (!outputs.flat.defined()) check.outputs_no_overlap(outputs.parts, what);
  check_in_place_or_no_overlap(check, input, outputs, what);
}

bool overlap(const RankTensors& a, const RankTensors& b, int size) {
  if (a.flat.defined() && b.flat.defined()) return memory_overlaps(a.flat, b.flat);
  std::vector<std::pair<MemoryRange, bool>> ranges;  // true for a range of b
  for (const auto& one : a.all(size)) ranges.emplace_back(memory_range(one), false);
  for (const auto& one : b.all(size)) ranges.emplace_back(memory_range(one), true);
  std::erase_if(ranges, [](const auto& range) { return range.first.empty(); });
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& one, const auto& other) { return one.first.begin < other.first.begin; });
  std::array<uintptr_t, 2> ends{};
  for (const auto& [range, of_b] : ranges) {
    if (range.begin < ends[!of_b]) return true;
    ends[of_b] = std::max(ends[of_b], range.end);
  }
  return false;
}

// Clones the input of an in-place all-to-all, because parts arrive where others have yet to be sent
// from. This is a local decision: the other ranks cannot observe it.
void copy_if_in_place(RankTensors& in, const RankTensors& out, int size) {
  if (!overlap(in, out, size)) return;
  const at::NoGradGuard no_grad;
  if (in.is_uniform_flat()) {
    in.flat = in.flat.clone();
    return;
  }
  in.flat = at::Tensor();
  for (auto& part : in.parts) part = part.clone();
}

// Throws unless each part has `expected` elements. `expected` is equal on all ranks.
void check_equal_parts(const Checker& check, const std::vector<at::Tensor>& parts, int64_t expected,
                       std::string_view what) {
  for (size_t i = 0; i < parts.size(); ++i) {
    check.numel(parts[i], expected, {what, static_cast<int64_t>(i)});
  }
}

}  // namespace

Checker TorchComm::checker(std::string_view op) const {
  auto members = membership();
  const auto& context = members->context;
  return {op, device_, context.rank, context.size, std::move(members), backend_name_ != "fake"};
}

// --- Point to point ------------------------------------------------------------------------------

void TorchComm::check_tag(const Checker& check, int tag) const {
  TORCH_OVERLAP_CHECK(tag >= 0, kValue, check.op, ": expected a tag >= 0, got ", tag);
  TORCH_OVERLAP_CHECK(tag == 0 || has_tags(), kUnsupported, check.op,
                      ": expected tag 0 on backend '", backend_name_,
                      "', which sends no tags, got ", tag,
                      "; messages between two ranks match in order of issue, and "
                      "torch.distributed's send and recv have tags on every device");
}

bool TorchComm::has_tags() const { return membership()->backend->has_tags(); }

WorkPtr TorchComm::send(const Tensor& tensor, int dst, bool async_op, const OpOptions& options,
                        int tag) {
  const Checker check = checker("send");
  check.tensor(tensor, "tensor");
  check.rank_in_range(dst, "dst");
  check_tag(check, tag);
  TORCH_OVERLAP_CHECK(dst != check.rank, kValue, "send: expected another rank as dst, got ", dst,
                      ", which is this rank; a batch may send to its own rank");
  Call call = make_call(OpName::send, Primitive::p2p);
  call.peer = dst;
  call.p2p.push_back({P2POp::Type::SEND, tensor, dst, tag});
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::recv(const Tensor& tensor, int src, bool async_op, const OpOptions& options,
                        int tag) {
  const Checker check = checker("recv");
  check.tensor(tensor, "tensor");
  check_tag(check, tag);
  if (src == kAnySource) {
    TORCH_OVERLAP_CHECK(has_tags(), kUnsupported, "recv: expected a source rank on backend '",
                        backend_name_, "', got any; pass src");
    TORCH_OVERLAP_CHECK(
        tensor.numel() > 0, kValue,
        "recv: expected a tensor with elements to receive from any rank, got sizes ",
        tensor.sizes(), "; an empty message is not sent");
  } else {
    check.rank_in_range(src, "src");
  }
  TORCH_OVERLAP_CHECK(src != check.rank, kValue, "recv: expected another rank as src, got ", src,
                      ", which is this rank; a batch may receive from its own rank");
  Call call = make_call(OpName::recv, Primitive::p2p);
  call.peer = src;
  call.p2p.push_back({P2POp::Type::RECV, tensor, src, tag});
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::batch_send_recv(std::vector<P2POp> ops, bool async_op,
                                   const OpOptions& options) {
  const Checker check = checker("batch_op_issue");
  TORCH_OVERLAP_CHECK(!ops.empty(), kValue,
                      "batch_op_issue: expected at least one send or recv, got an empty batch");
  // Sort by tag: within one tag, a rank's sends to itself match its own receives in order.
  std::stable_sort(ops.begin(), ops.end(),
                   [](const P2POp& a, const P2POp& b) { return a.tag < b.tag; });
  std::vector<const P2POp*> self_sends;
  std::vector<const P2POp*> self_recvs;
  for (const auto& op : ops) {
    check.tensor(op.tensor, "tensor");
    check.rank_in_range(op.peer, "peer");
    check_tag(check, op.tag);
    if (op.peer != check.rank) continue;
    (op.type == P2POp::Type::SEND ? self_sends : self_recvs).push_back(&op);
  }
  TORCH_OVERLAP_CHECK(
      self_sends.size() == self_recvs.size(), kValue,
      "batch_op_issue: expected as many sends to this rank as receives from it, got ",
      self_sends.size(), " and ", self_recvs.size());
  for (size_t i = 0; i < self_sends.size(); ++i) {
    const at::Tensor& sent = self_sends[i]->tensor;
    TORCH_OVERLAP_CHECK(
        self_sends[i]->tag == self_recvs[i]->tag, kValue,
        "batch_op_issue: expected a receive from this rank for each tag sent to it, "
        "got tag ",
        self_sends[i]->tag, " sent and ", self_recvs[i]->tag, " received");
    check.tensor_like(self_recvs[i]->tensor, sent, "a receive from this rank");
    check.numel(self_recvs[i]->tensor, sent.numel(), "a receive from this rank");
  }
  check.recv_no_overlap(ops);
  Call call = make_call(OpName::batch_op_issue, Primitive::p2p);
  call.p2p = std::move(ops);
  return issue(check, std::move(call), async_op, options);
}

void BatchSendRecv::send(const at::Tensor& tensor, int dst, int tag) {
  ops_.push_back({P2POp::Type::SEND, tensor, dst, tag});
}

void BatchSendRecv::recv(const at::Tensor& tensor, int src, int tag) {
  ops_.push_back({P2POp::Type::RECV, tensor, src, tag});
}

WorkPtr BatchSendRecv::issue(bool async_op, const BatchP2POptions& options) {
  auto ops = std::move(ops_);
  ops_.clear();
  return comm_->batch_send_recv(std::move(ops), async_op, options);
}

// --- In place ------------------------------------------------------------------------------------

WorkPtr TorchComm::broadcast(const Tensor& tensor, int root, bool async_op,
                             const OpOptions& options) {
  const Checker check = checker("broadcast");
  check.tensor(tensor, "tensor");
  check.rank_in_range(root, "root");
  Call call = make_call(OpName::broadcast, Primitive::broadcast, tensor);
  call.root = root;
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::all_reduce(const Tensor& tensor, const ReduceOp& op, bool async_op,
                              const OpOptions& options) {
  if (tensor.defined() && tensor.is_sparse()) {
    return all_reduce_sparse(tensor, op, async_op, options);
  }
  const Checker check = checker("all_reduce");
  check.tensor(tensor, "tensor");
  check.reduction(tensor, op);
  Call call = make_call(OpName::all_reduce, Primitive::all_reduce, tensor);
  call.reduce_op = op;
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::reduce(const Tensor& tensor, int root, const ReduceOp& op, bool async_op,
                          const OpOptions& options) {
  const Checker check = checker("reduce");
  check.tensor(tensor, "tensor");
  check.rank_in_range(root, "root");
  check.reduction(tensor, op);
  Call call = make_call(OpName::reduce, Primitive::reduce, tensor);
  call.reduce_op = op;
  call.root = root;
  return issue(check, std::move(call), async_op, options);
}

// --- Gathering -----------------------------------------------------------------------------------

WorkPtr TorchComm::all_gather(const Tensors& outputs, const Tensor& input, bool async_op,
                              const OpOptions& options) {
  const Checker check = checker("all_gather");
  check.tensor(input, "tensor");
  check.list(outputs, input, "tensor_list");
  check_equal_parts(check, outputs, input.numel(), "tensor_list");
  Call call = make_call(OpName::all_gather, Primitive::all_gather, input);
  call.out = rank_tensors_of(outputs);
  check_outputs(check, input, call.out, "tensor_list");
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::all_gather_single(const Tensor& output, const Tensor& input, bool async_op,
                                     const OpOptions& options) {
  const Checker check = checker("all_gather_single");
  check.tensor(input, "input");
  check.tensor_like(output, input, "output");
  check.numel_of_all(output, input, "output", "input");
  Call call = make_call(OpName::all_gather_single, Primitive::all_gather, input);
  call.out.flat = output;
  check_in_place_or_no_overlap(check, input, call.out, "an output");
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::all_gather_v(const Tensors& outputs, const Tensor& input, bool async_op,
                                const OpOptions& options) {
  const Checker check = checker("all_gather_v");
  check.tensor(input, "tensor");
  check.list(outputs, input, "tensor_list");
  check.numel(input, outputs[check.rank].numel(), {"tensor, as tensor_list", check.rank});
  Call call = make_call(OpName::all_gather_v, Primitive::all_gather, input);
  call.out = rank_tensors_of(outputs);
  check_outputs(check, input, call.out, "tensor_list");
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::gather(const Tensors& outputs, const Tensor& input, int root, bool async_op,
                          const OpOptions& options) {
  const Checker check = checker("gather");
  check.tensor(input, "input_tensor");
  check.rank_in_range(root, "root");
  Call call = make_call(OpName::gather, Primitive::gather, input);
  call.root = root;
  if (check.rank == root) {
    check.list(outputs, input, "output_tensor_list");
    check_equal_parts(check, outputs, input.numel(), "output_tensor_list");
    call.out = rank_tensors_of(outputs);
    check_outputs(check, input, call.out, "output_tensor_list");
  }
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::gather_single(const Tensor& output, const Tensor& input, int root, bool async_op,
                                 const OpOptions& options) {
  const Checker check = checker("gather_single");
  check.tensor(input, "input");
  check.rank_in_range(root, "root");
  Call call = make_call(OpName::gather_single, Primitive::gather, input);
  call.root = root;
  if (check.rank == root) {
    check.tensor_like(output, input, "output");
    check.numel_of_all(output, input, "output", "input");
    call.out.flat = output;
    check_in_place_or_no_overlap(check, input, call.out, "an output");
  }
  return issue(check, std::move(call), async_op, options);
}

// --- Scattering ----------------------------------------------------------------------------------

WorkPtr TorchComm::reduce_scatter(const Tensor& output, const Tensors& inputs, const ReduceOp& op,
                                  bool async_op, const OpOptions& options) {
  const Checker check = checker("reduce_scatter");
  check.tensor(output, "output");
  check.list(inputs, output, "input_list");
  check_equal_parts(check, inputs, output.numel(), "input_list");
  check.reduction(output, op);
  Call call = make_call(OpName::reduce_scatter, Primitive::reduce_scatter, output);
  call.in = rank_tensors_of(inputs);
  check_in_place_or_no_overlap(check, output, call.in, "an output");
  call.reduce_op = op;
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::reduce_scatter_single(const Tensor& output, const Tensor& input,
                                         const ReduceOp& op, bool async_op,
                                         const OpOptions& options) {
  const Checker check = checker("reduce_scatter_single");
  check.tensor(output, "output");
  check.tensor_like(input, output, "input");
  check.numel_of_all(input, output, "input", "output");
  check.reduction(output, op);
  Call call = make_call(OpName::reduce_scatter_single, Primitive::reduce_scatter, output);
  call.in.flat = input;
  check_in_place_or_no_overlap(check, output, call.in, "an output");
  call.reduce_op = op;
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::reduce_scatter_v(const Tensor& output, const Tensors& inputs, const ReduceOp& op,
                                    bool async_op, const OpOptions& options) {
  const Checker check = checker("reduce_scatter_v");
  check.tensor(output, "output");
  check.list(inputs, output, "input_list");
  check.numel(output, inputs[check.rank].numel(), {"output, as input_list", check.rank});
  check.reduction(output, op);
  Call call = make_call(OpName::reduce_scatter_v, Primitive::reduce_scatter, output);
  call.in = rank_tensors_of(inputs);
  check_in_place_or_no_overlap(check, output, call.in, "an output");
  call.reduce_op = op;
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::scatter(const Tensor& output, const Tensors& inputs, int root, bool async_op,
                           const OpOptions& options) {
  const Checker check = checker("scatter");
  check.tensor(output, "output_tensor");
  check.rank_in_range(root, "root");
  Call call = make_call(OpName::scatter, Primitive::scatter, output);
  call.root = root;
  if (check.rank == root) {
    check.list(inputs, output, "input_tensor_list");
    check_equal_parts(check, inputs, output.numel(), "input_tensor_list");
    call.in = rank_tensors_of(inputs);
    check_in_place_or_no_overlap(check, output, call.in, "an output");
  }
  return issue(check, std::move(call), async_op, options);
}

// --- All to all ----------------------------------------------------------------------------------

WorkPtr TorchComm::all_to_all(const Tensors& outputs, const Tensors& inputs, bool async_op,
                              const OpOptions& options) {
  const Checker check = checker("all_to_all");
  TORCH_OVERLAP_CHECK(!inputs.empty() && inputs[0].defined(), kValue, "all_to_all: expected ",
                      check.size, " tensors as input_tensor_list, got none");
  check.list(inputs, inputs[0], "input_tensor_list");
  check.list(outputs, inputs[0], "output_tensor_list");
  check.numel(outputs[check.rank], inputs[check.rank].numel(),
              {"output_tensor_list, as input_tensor_list", check.rank});
  Call call = make_call(OpName::all_to_all, Primitive::all_to_all);
  call.in = rank_tensors_of(inputs);
  call.out = rank_tensors_of(outputs);
  if (!call.out.flat.defined()) check.outputs_no_overlap(call.out.parts, "output_tensor_list");
  copy_if_in_place(call.in, call.out, check.size);
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::all_to_all_single(const Tensor& output, const Tensor& input, bool async_op,
                                     const OpOptions& options) {
  const Checker check = checker("all_to_all_single");
  check.tensor(input, "input");
  check.tensor_like(output, input, "output");
  check.numel(output, input.numel(), "output");
  TORCH_OVERLAP_CHECK(input.numel() % check.size == 0, kValue,
                      "all_to_all_single: expected a number of elements divisible by ", check.size,
                      ", got ", input.numel(), "; use all_to_all_v_single for unequal parts");
  Call call = make_call(OpName::all_to_all_single, Primitive::all_to_all);
  call.in.flat = input;
  call.out.flat = output;
  copy_if_in_place(call.in, call.out, check.size);
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::all_to_all_v_single(const Tensor& output, const Tensor& input,
                                       const std::vector<int64_t>& output_splits,
                                       const std::vector<int64_t>& input_splits, bool async_op,
                                       const OpOptions& options) {
  const Checker check = checker("all_to_all_v_single");
  check.tensor(input, "input");
  check.tensor_like(output, input, "output");
  check_splits(check, output, output_splits, "output");
  check_splits(check, input, input_splits, "input");
  Call call = make_call(OpName::all_to_all_v_single, Primitive::all_to_all);
  call.in = split_rank_tensors(input, input_splits);
  call.out = split_rank_tensors(output, output_splits);
  check.numel(call.out.part(check.rank, check.size), call.in.part(check.rank, check.size).numel(),
              "an output part for this rank itself");
  copy_if_in_place(call.in, call.out, check.size);
  return issue(check, std::move(call), async_op, options);
}

WorkPtr TorchComm::barrier(bool async_op, const OpOptions& options) {
  return issue(checker("barrier"), make_call(OpName::barrier, Primitive::barrier), async_op,
               options);
}

}  // namespace torch_overlap
