// Collectives of c10d::Backend: each one converts its arguments and calls TorchComm, which
// validates them.
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "torch_overlap/base/boundary.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/c10d/backend_wrapper.h"
#include "torch_overlap/comm/c10d/convert.h"
#include "torch_overlap/common/memory_overlap.h"

namespace torch_overlap {
namespace {

using Tensors = std::vector<at::Tensor>;

// If sizes differ between ranks, the operation is the one with the suffix "_v".
bool same_size(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.numel() == tensors.front().numel();
  });
}

void check_pairs(const Tensors& outputs, const Tensors& inputs, std::string_view op) {
  TORCH_OVERLAP_CHECK(outputs.size() == inputs.size() && !inputs.empty(), kValue, op,
                      ": expected as many outputs as inputs, at least one, got ", outputs.size(),
                      " and ", inputs.size());
}

// Returns the inputs if an output aliases one of them: such outputs are then staged, so that the
// inputs stay valid until they are read. Returns an empty list if the only aliasing is that of an
// in-place operation: a pair (output, input) that `may_be_same` allows and that is the same memory,
// or of which one is the part of rank `own` in the other.
template <typename MayBeSame>
Tensors inputs_to_keep(const Tensors& outputs, const Tensors& inputs, int own,
                       const MayBeSame& may_be_same) {
  for (size_t o = 0; o < outputs.size(); ++o) {
    const MemoryRange out = memory_range(outputs[o]);
    for (size_t i = 0; i < inputs.size(); ++i) {
      const MemoryRange in = memory_range(inputs[i]);
      if (!out.overlaps(in)) continue;
      const auto& [whole, part] =
          outputs[o].numel() > inputs[i].numel() ? std::pair(out, in) : std::pair(in, out);
      const bool is_part = outputs[o].numel() != inputs[i].numel();
      const uintptr_t offset = is_part ? own * (part.end - part.begin) : 0;
      if (!may_be_same(o, i) || part.begin != whole.begin + offset) return inputs;
    }
  }
  return {};
}

// Predicates for one output and one input per pair, and for one output or input per rank.
bool is_same_index(size_t output, size_t input) { return output == input; }
auto is_index_of(int rank) {
  return [rank](size_t output, size_t input) {
    return std::max(output, input) == static_cast<size_t>(rank);
  };
}

// The equal parts of an all-to-all are rows of dimension 0.
void check_rows(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size,
                std::string_view what) {
  const bool divides = tensor.dim() > 0 && tensor.size(0) % size == 0;
  TORCH_OVERLAP_CHECK(!splits.empty() || divides, kValue, "all_to_all_single: expected ", what,
                      " with a first dimension divisible by ", size, ", got sizes ", tensor.sizes(),
                      "; pass split sizes");
}

int int_rank(int64_t rank) { return static_cast<int>(rank); }

}  // namespace

using C10dWork = BackendWrapper::C10dWork;

// --- In place ----------------------------------------------------------------------------------

C10dWork BackendWrapper::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  if (tensors.size() > 1) return broadcast_several(tensors, opts);
  return operation([&] {
    const auto& tensor = only(tensors, "broadcast");
    const int root = int_rank(opts.rootRank);
    WorkParts parts = begin_work(c10d::OpType::BROADCAST, tensors, tensors);
    const auto memory = root == getRank()
                            ? contiguous_input(tensor)
                            : contiguous_output(tensor, parts.copies, /*reads=*/false, "broadcast");
    parts.works.push_back(
        comm_for(tensor.device())->broadcast(memory, root, opts.asyncOp, op_options(opts.timeout)));
    return wrap(std::move(parts));
  });
}

C10dWork BackendWrapper::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() > 1) return all_reduce_several(tensors, opts);
  (void)only(tensors, "all_reduce");
  return all_reduce_each(tensors, c10d::OpType::ALLREDUCE, opts);
}

C10dWork BackendWrapper::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return allreduce(tensors, opts);
}

C10dWork BackendWrapper::allreduce_coalesced(Tensors& tensors,
                                             const c10d::AllreduceCoalescedOptions& opts) {
  return all_reduce_each(tensors, c10d::OpType::ALLREDUCE_COALESCED, opts);
}

C10dWork BackendWrapper::all_reduce_each(Tensors& tensors, c10d::OpType type,
                                         const c10d::AllreduceOptions& opts) {
  return operation([&] {
    TORCH_OVERLAP_CHECK(!tensors.empty(), kValue,
                        "all_reduce_coalesced: expected at least one tensor, got none");
    const auto op = from_c10d(opts.reduceOp);
    WorkParts parts = begin_work(type, tensors, tensors);
    for (const auto& memory :
         contiguous_output(tensors, parts.copies, /*reads=*/true, "all_reduce")) {
      parts.works.push_back(comm_for(memory.device())
                                ->all_reduce(memory, op, opts.asyncOp, op_options(opts.timeout)));
    }
    return wrap(std::move(parts));
  });
}

C10dWork BackendWrapper::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return operation([&] {
    const auto& tensor = only(tensors, "reduce");
    const int root = int_rank(opts.rootRank);
    WorkParts parts = begin_work(c10d::OpType::REDUCE, tensors, tensors);
    const auto memory = root == getRank()
                            ? contiguous_output(tensor, parts.copies, /*reads=*/true, "reduce")
                            : contiguous_input(tensor);
    parts.works.push_back(comm_for(tensor.device())
                              ->reduce(memory, root, from_c10d(opts.reduceOp), opts.asyncOp,
                                       op_options(opts.timeout)));
    return wrap(std::move(parts));
  });
}

// --- Gathering ---------------------------------------------------------------------------------

C10dWork BackendWrapper::allgather(TensorLists& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& opts) {
  if (inputs.size() > 1) return all_gather_several(outputs, inputs, opts);
  return operation([&] {
    WorkParts parts = begin_work(c10d::OpType::ALLGATHER, inputs, only(outputs, "all_gather"));
    const auto input = contiguous_input(only(inputs, "all_gather"));
    const auto targets = contiguous_output(
        parts.outputs, parts.copies, /*reads=*/false, "all_gather",
        inputs_to_keep(parts.outputs, {input}, getRank(), is_index_of(getRank())));
    const auto comm = comm_for(input.device());
    const auto options = op_options(opts.timeout);
    parts.works.push_back(same_size(targets)
                              ? comm->all_gather(targets, input, opts.asyncOp, options)
                              : comm->all_gather_v(targets, input, opts.asyncOp, options));
    return wrap(std::move(parts));
  });
}

C10dWork BackendWrapper::_allgather_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::AllgatherOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return gather_each(outputs, inputs, c10d::OpType::_ALLGATHER_BASE, opts);
}

C10dWork BackendWrapper::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& opts) {
  return operation([&] {
    // outputs[rank][i] becomes inputs[i] of that rank.
    WorkParts parts = begin_work(c10d::OpType::ALLGATHER_COALESCED, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      for (const auto& of_rank : outputs) {
        TORCH_OVERLAP_CHECK(of_rank.size() == inputs.size(), kValue,
                            "all_gather_coalesced: expected ", inputs.size(),
                            " outputs for each rank, got ", of_rank.size());
        parts.outputs.push_back(of_rank[i]);
      }
    }
    const auto sources = contiguous_input(inputs);
    const auto targets = contiguous_output(
        parts.outputs, parts.copies, /*reads=*/false, "all_gather_coalesced",
        inputs_to_keep(parts.outputs, sources, getRank(),
                       [ranks = outputs.size(), rank = getRank()](size_t o, size_t i) {
                         return o == i * ranks + static_cast<size_t>(rank);
                       }));
    for (size_t i = 0; i < sources.size(); ++i) {
      const auto first = targets.begin() + static_cast<int64_t>(i * outputs.size());
      const Tensors list(first, first + static_cast<int64_t>(outputs.size()));
      parts.works.push_back(
          comm_for(sources[i].device())
              ->all_gather(list, sources[i], opts.asyncOp, op_options(opts.timeout)));
    }
    return wrap(std::move(parts));
  });
}

C10dWork BackendWrapper::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  return gather_each(outputs, inputs, c10d::OpType::COALESCED, opts);
}

C10dWork BackendWrapper::gather_each(Tensors& outputs, Tensors& inputs, c10d::OpType type,
                                     const c10d::AllgatherOptions& opts) {
  return operation([&] {
    check_pairs(outputs, inputs, "all_gather_into_tensor");
    WorkParts parts = begin_work(type, inputs, outputs);
    const auto sources = contiguous_input(inputs);
    const auto targets =
        contiguous_output(outputs, parts.copies, /*reads=*/false, "all_gather_into_tensor",
                          inputs_to_keep(outputs, sources, getRank(), is_same_index));
    for (size_t i = 0; i < sources.size(); ++i) {
      parts.works.push_back(
          comm_for(sources[i].device())
              ->all_gather_single(targets[i], sources[i], opts.asyncOp, op_options(opts.timeout)));
    }
    return wrap(std::move(parts));
  });
}

C10dWork BackendWrapper::gather(TensorLists& outputs, Tensors& inputs,
                                const c10d::GatherOptions& opts) {
  return operation([&] {
    const int root = int_rank(opts.rootRank);
    WorkParts parts =
        begin_work(c10d::OpType::GATHER, inputs, root_list(outputs, root == getRank(), "gather"));
    const auto input = contiguous_input(only(inputs, "gather"));
    const auto targets =
        contiguous_output(parts.outputs, parts.copies, /*reads=*/false, "gather",
                          inputs_to_keep(parts.outputs, {input}, root, is_index_of(root)));
    parts.works.push_back(
        comm_for(input.device())
            ->gather(targets, input, root, opts.asyncOp, op_options(opts.timeout)));
    return wrap(std::move(parts));
  });
}

// --- Scattering --------------------------------------------------------------------------------

C10dWork BackendWrapper::scatter(Tensors& outputs, TensorLists& inputs,
                                 const c10d::ScatterOptions& opts) {
  return operation([&] {
    const int root = int_rank(opts.rootRank);
    const auto list = contiguous_input(root_list(inputs, root == getRank(), "scatter"));
    WorkParts parts = begin_work(c10d::OpType::SCATTER, list, outputs);
    (void)only(outputs, "scatter");
    const auto target = contiguous_output(outputs, parts.copies, /*reads=*/false, "scatter",
                                          inputs_to_keep(outputs, list, root, is_index_of(root)))
                            .front();
    parts.works.push_back(
        comm_for(target.device())
            ->scatter(target, list, root, opts.asyncOp, op_options(opts.timeout)));
    return wrap(std::move(parts));
  });
}

C10dWork BackendWrapper::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ReduceScatterOptions& opts) {
  return operation([&] {
    const auto list = contiguous_input(only(inputs, "reduce_scatter"));
    WorkParts parts = begin_work(c10d::OpType::REDUCE_SCATTER, list, outputs);
    (void)only(outputs, "reduce_scatter");
    const auto target =
        contiguous_output(outputs, parts.copies, /*reads=*/false, "reduce_scatter",
                          inputs_to_keep(outputs, list, getRank(), is_index_of(getRank())))
            .front();
    const auto comm = comm_for(target.device());
    const auto op = from_c10d(opts.reduceOp);
    const auto options = op_options(opts.timeout);
    parts.works.push_back(same_size(list)
                              ? comm->reduce_scatter(target, list, op, opts.asyncOp, options)
                              : comm->reduce_scatter_v(target, list, op, opts.asyncOp, options));
    return wrap(std::move(parts));
  });
}

C10dWork BackendWrapper::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_each(outputs, inputs, c10d::OpType::_REDUCE_SCATTER_BASE, opts);
}

C10dWork BackendWrapper::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::ReduceScatterOptions& opts) {
  return reduce_scatter_each(outputs, inputs, c10d::OpType::COALESCED, opts);
}

C10dWork BackendWrapper::reduce_scatter_each(Tensors& outputs, Tensors& inputs, c10d::OpType type,
                                             const c10d::ReduceScatterOptions& opts) {
  return operation([&] {
    check_pairs(outputs, inputs, "reduce_scatter_tensor");
    const auto op = from_c10d(opts.reduceOp);
    WorkParts parts = begin_work(type, inputs, outputs);
    const auto sources = contiguous_input(inputs);
    const auto targets =
        contiguous_output(outputs, parts.copies, /*reads=*/false, "reduce_scatter_tensor",
                          inputs_to_keep(outputs, sources, getRank(), is_same_index));
    for (size_t i = 0; i < sources.size(); ++i) {
      parts.works.push_back(comm_for(targets[i].device())
                                ->reduce_scatter_single(targets[i], sources[i], op, opts.asyncOp,
                                                        op_options(opts.timeout)));
    }
    return wrap(std::move(parts));
  });
}

// --- All to all --------------------------------------------------------------------------------

C10dWork BackendWrapper::alltoall_base(at::Tensor& output, at::Tensor& input,
                                       std::vector<int64_t>& output_splits,
                                       std::vector<int64_t>& input_splits,
                                       const c10d::AllToAllOptions& opts) {
  return operation([&] {
    check_rows(output, output_splits, getSize(), "output");
    check_rows(input, input_splits, getSize(), "input");
    WorkParts parts = begin_work(c10d::OpType::ALLTOALL_BASE, {input}, {output});
    const auto source = contiguous_input(input);
    const auto target =
        contiguous_output(output, parts.copies, /*reads=*/false, "all_to_all_single");
    const auto comm = comm_for(input.device());
    const auto options = op_options(opts.timeout);
    const bool even = output_splits.empty() && input_splits.empty();
    parts.works.push_back(even ? comm->all_to_all_single(target, source, opts.asyncOp, options)
                               : comm->all_to_all_v_single(target, source, output_splits,
                                                           input_splits, opts.asyncOp, options));
    return wrap(std::move(parts));
  });
}

C10dWork BackendWrapper::alltoall(Tensors& outputs, Tensors& inputs,
                                  const c10d::AllToAllOptions& opts) {
  return operation([&] {
    check_pairs(outputs, inputs, "all_to_all");
    WorkParts parts = begin_work(c10d::OpType::ALLTOALL, inputs, outputs);
    const auto sources = contiguous_input(inputs);
    const auto targets = contiguous_output(outputs, parts.copies, /*reads=*/false, "all_to_all");
    parts.works.push_back(
        comm_for(sources.front().device())
            ->all_to_all(targets, sources, opts.asyncOp, op_options(opts.timeout)));
    return wrap(std::move(parts));
  });
}

// --- Barrier -----------------------------------------------------------------------------------

// Returns the group's accelerator if it was used or is requested: a barrier then also waits for the
// work on it. Otherwise returns the CPU.
c10::Device BackendWrapper::barrier_device(const c10d::BarrierOptions& opts) const {
  if (existing_comm_) return existing_comm_->device();
  const auto has = [&](const char* name) { return options_->backends.count(name) != 0; };
  const auto type = [&] {
    const std::lock_guard lock(mutex_);
    for (const auto& [used, slot] : slots_) {
      if (used != c10::kCPU) return used;
    }
    if (opts.device && opts.device->type() != c10::kCPU) return opts.device->type();
    const bool asked = !opts.device_ids.empty() && at::hasCUDA();
    return has("cuda") && (asked || !has("cpu")) ? c10::kCUDA : c10::kCPU;
  }();
  if (type == c10::kCPU) return c10::kCPU;
  if (opts.device && opts.device->type() == type && opts.device->has_index()) return *opts.device;
  if (!opts.device_ids.empty()) {
    return {type, static_cast<c10::DeviceIndex>(opts.device_ids.front())};
  }
  return getBoundDeviceId().value_or(c10::Device(type));
}

C10dWork BackendWrapper::barrier(const c10d::BarrierOptions& opts) {
  return operation([&] {
    WorkParts parts = begin_work(c10d::OpType::BARRIER, {});
    parts.blocks_host = true;
    parts.works.push_back(
        comm_for(barrier_device(opts))->barrier(opts.asyncOp, op_options(opts.timeout)));
    return wrap(std::move(parts));
  });
}

}  // namespace torch_overlap
