// Collectives over several tensors of each rank, with the results of torch's gloo backend.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/c10d/backend_wrapper.h"
#include "torch_overlap/comm/c10d/convert.h"
#include "torch_overlap/comm/composed.h"

namespace torch_overlap {
namespace {

using Tensors = std::vector<at::Tensor>;

// The ranks have the same number of tensors. torch's NCCL backend takes one, as only() does.
void check_alike(const Tensors& tensors, const at::Tensor& first, std::string_view op) {
  for (const auto& tensor : tensors) {
    TORCH_OVERLAP_CHECK(tensor.device().is_cpu(), kValue, op,
                        ": expected one tensor for this rank on ", tensor.device().str(),
                        ", got several; a process drives one device");
    TORCH_OVERLAP_CHECK(tensor.sizes() == first.sizes() && tensor.dtype() == first.dtype(), kValue,
                        op, ": expected tensors of sizes ", first.sizes(), " and dtype ",
                        first.dtype().name(), " like the first one, got ", tensor.sizes(), " and ",
                        tensor.dtype().name(), "; call all_reduce_coalesced, or once for each");
  }
}

}  // namespace

using C10dWork = BackendWrapper::C10dWork;

// Every tensor of every rank becomes the one that rank `rootRank` has at `rootTensor`.
C10dWork BackendWrapper::broadcast_several(const Tensors& tensors,
                                           const c10d::BroadcastOptions& opts) {
  return operation([&] {
    check_alike(tensors, tensors.front(), "broadcast");
    const auto sent = static_cast<size_t>(opts.rootTensor);
    TORCH_OVERLAP_CHECK(sent < tensors.size(), kValue, "broadcast: expected rootTensor in [0, ",
                        tensors.size(), "), got ", opts.rootTensor);
    const int root = static_cast<int>(opts.rootRank);
    WorkParts parts = begin_work(c10d::OpType::BROADCAST, tensors, tensors);
    const auto memory = root == getRank() ? contiguous_input(tensors[sent])
                                          : contiguous_output(tensors[sent], parts.copies,
                                                              /*reads=*/false, "broadcast");
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (i != sent) parts.copies.push_back({memory, tensors[i]});
    }
    parts.works.push_back(
        comm_for(memory.device())->broadcast(memory, root, opts.asyncOp, op_options(opts.timeout)));
    return wrap(std::move(parts));
  });
}

// Every tensor of every rank becomes the reduction of all of them.
C10dWork BackendWrapper::all_reduce_several(const Tensors& tensors,
                                            const c10d::AllreduceOptions& opts) {
  return operation([&] {
    check_alike(tensors, tensors.front(), "all_reduce");
    const auto op = from_c10d(opts.reduceOp);
    TORCH_OVERLAP_CHECK(op.type() != RedOpType::AVG && op.type() != RedOpType::PREMUL_SUM,
                        kUnsupported,
                        "all_reduce: expected SUM, PRODUCT, MIN, MAX or a bitwise operation for "
                        "several tensors of a rank, got ",
                        to_string(op.type()), ". Call it for each tensor.");
    WorkParts parts = begin_work(c10d::OpType::ALLREDUCE, tensors, tensors);
    const at::NoGradGuard no_grad;
    const at::Tensor reduced = at::empty(tensors.front().sizes(), tensors.front().options());
    reduce_parts(reduced, contiguous_input(tensors), op.type(), /*factors=*/{});
    for (const auto& tensor : tensors) parts.copies.push_back({reduced, tensor});
    parts.works.push_back(comm_for(reduced.device())
                              ->all_reduce(reduced, op, opts.asyncOp, op_options(opts.timeout)));
    return wrap(std::move(parts));
  });
}

// outputs[j][r * n + i] becomes inputs[i] of rank r, for each of the n lists j.
C10dWork BackendWrapper::all_gather_several(const TensorLists& outputs, const Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) {
  return operation([&] {
    check_alike(inputs, inputs.front(), "all_gather");
    const size_t count = inputs.size();
    TORCH_OVERLAP_CHECK(outputs.size() == count, kValue, "all_gather: expected ", count,
                        " lists of outputs for ", count, " inputs, got ", outputs.size());
    for (const auto& list : outputs) {
      TORCH_OVERLAP_CHECK(list.size() == count * getSize(), kValue, "all_gather: expected ",
                          count * getSize(), " tensors in each list of outputs, got ", list.size());
      check_alike(list, inputs.front(), "all_gather");
    }
    WorkParts parts = begin_work(c10d::OpType::ALLGATHER, inputs, outputs.front());
    const auto sources = contiguous_input(inputs);
    const auto targets =
        contiguous_output(outputs.front(), parts.copies, /*reads=*/false, "all_gather", sources);
    for (size_t j = 1; j < count; ++j) {
      for (size_t k = 0; k < targets.size(); ++k) {
        parts.copies.push_back({targets[k], outputs[j][k]});
      }
    }
    for (size_t i = 0; i < count; ++i) {
      Tensors of_ranks;
      for (size_t k = i; k < targets.size(); k += count) of_ranks.push_back(targets[k]);
      parts.works.push_back(
          comm_for(sources[i].device())
              ->all_gather(of_ranks, sources[i], opts.asyncOp, op_options(opts.timeout)));
    }
    return wrap(std::move(parts));
  });
}

}  // namespace torch_overlap
