// The collectives of c10d::Backend: each converts its arguments and calls TorchComm, which
// validates.
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "torch_overlap/base/boundary.h"
#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/c10d/backend_wrapper.h"
#include "torch_overlap/comm/c10d/convert.h"

namespace torch_overlap {
namespace {

using Tensors = std::vector<at::Tensor>;

// Ranks may differ in size; then the operation is the one with "_v".
bool same_size(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.numel() == tensors.front().numel();
  });
}

Tensors contiguous(const Tensors& tensors) {
  Tensors result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) result.push_back(tensor.contiguous());
  return result;
}

void check_pairs(const Tensors& outputs, const Tensors& inputs, std::string_view op) {
  TORCH_OVERLAP_CHECK(outputs.size() == inputs.size() && !inputs.empty(), kValue, op,
                      ": expected as many outputs as inputs, at least one, got ", outputs.size(),
                      " and ", inputs.size());
}

int int_rank(int64_t rank) { return static_cast<int>(rank); }

}  // namespace

using C10dWork = BackendWrapper::C10dWork;

// What every operation runs in: an error ends a coalescing, and leaves as torch hands it on.
template <typename Body>
C10dWork BackendWrapper::operation(const Body& body) {
  try {
    return at_boundary(body);
  } catch (...) {
    if (is_coalescing()) drop_coalescing();
    throw;
  }
}

// --- In place ----------------------------------------------------------------------------------

C10dWork BackendWrapper::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return operation([&] {
    const auto& tensor = only(tensors, "broadcast");
    auto work = comm_for(tensor.device())
                    ->broadcast(memory_of(tensor), int_rank(opts.rootRank), opts.asyncOp,
                                op_options(opts.timeout));
    return wrap(c10d::OpType::BROADCAST, {std::move(work)}, tensors);
  });
}

C10dWork BackendWrapper::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return operation([&] {
    const auto& tensor = only(tensors, "all_reduce");
    auto work = comm_for(tensor.device())
                    ->all_reduce(memory_of(tensor), from_c10d(opts.reduceOp), opts.asyncOp,
                                 op_options(opts.timeout));
    return wrap(c10d::OpType::ALLREDUCE, {std::move(work)}, tensors);
  });
}

C10dWork BackendWrapper::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return allreduce(tensors, opts);
}

C10dWork BackendWrapper::allreduce_coalesced(Tensors& tensors,
                                             const c10d::AllreduceCoalescedOptions& opts) {
  return operation([&] {
    TORCH_OVERLAP_CHECK(!tensors.empty(), kValue,
                        "all_reduce_coalesced: expected at least one tensor, got none");
    const auto op = from_c10d(opts.reduceOp);
    std::vector<WorkPtr> works;
    for (const auto& tensor : tensors) {
      works.push_back(
          comm_for(tensor.device())
              ->all_reduce(memory_of(tensor), op, opts.asyncOp, op_options(opts.timeout)));
    }
    return wrap(c10d::OpType::ALLREDUCE_COALESCED, std::move(works), tensors);
  });
}

C10dWork BackendWrapper::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return operation([&] {
    const auto& tensor = only(tensors, "reduce");
    auto work = comm_for(tensor.device())
                    ->reduce(memory_of(tensor), int_rank(opts.rootRank), from_c10d(opts.reduceOp),
                             opts.asyncOp, op_options(opts.timeout));
    return wrap(c10d::OpType::REDUCE, {std::move(work)}, tensors);
  });
}

// --- Gathering ---------------------------------------------------------------------------------

C10dWork BackendWrapper::allgather(TensorLists& outputs, Tensors& inputs,
                                   const c10d::AllgatherOptions& opts) {
  return operation([&] {
    const auto& list = only(outputs, "all_gather");
    const auto input = only(inputs, "all_gather").contiguous();
    WorkParts parts;
    parts.type = c10d::OpType::ALLGATHER;
    parts.outputs = list;
    if (overlap(list)) {
      for (const auto& output : list) parts.staging.push_back(at::empty_like(output));
      parts.epilogue = [list, staging = parts.staging] {
        for (size_t rank = 0; rank < list.size(); ++rank) list[rank].detach().copy_(staging[rank]);
      };
    }
    const auto& targets = parts.staging.empty() ? list : parts.staging;
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
  return operation([&] {
    auto work =
        comm_for(input.device())
            ->all_gather_single(output, input.contiguous(), opts.asyncOp, op_options(opts.timeout));
    return wrap(c10d::OpType::_ALLGATHER_BASE, {std::move(work)}, {output});
  });
}

C10dWork BackendWrapper::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                             const c10d::AllgatherOptions& opts) {
  return operation([&] {
    // outputs[rank][i] becomes that rank's inputs[i].
    std::vector<WorkPtr> works;
    Tensors all;
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors list;
      for (const auto& of_rank : outputs) {
        TORCH_OVERLAP_CHECK(of_rank.size() == inputs.size(), kValue,
                            "all_gather_coalesced: expected ", inputs.size(),
                            " outputs for each rank, got ", of_rank.size());
        list.push_back(of_rank[i]);
      }
      works.push_back(
          comm_for(inputs[i].device())
              ->all_gather(list, inputs[i].contiguous(), opts.asyncOp, op_options(opts.timeout)));
      all.insert(all.end(), list.begin(), list.end());
    }
    return wrap(c10d::OpType::ALLGATHER_COALESCED, std::move(works), std::move(all));
  });
}

C10dWork BackendWrapper::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  return operation([&] {
    check_pairs(outputs, inputs, "all_gather_into_tensor_coalesced");
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < inputs.size(); ++i) {
      works.push_back(comm_for(inputs[i].device())
                          ->all_gather_single(outputs[i], inputs[i].contiguous(), opts.asyncOp,
                                              op_options(opts.timeout)));
    }
    return wrap(c10d::OpType::COALESCED, std::move(works), outputs);
  });
}

C10dWork BackendWrapper::gather(TensorLists& outputs, Tensors& inputs,
                                const c10d::GatherOptions& opts) {
  return operation([&] {
    const int root = int_rank(opts.rootRank);
    const auto list = root_list(outputs, root == getRank(), "gather");
    const auto input = only(inputs, "gather").contiguous();
    auto work =
        comm_for(input.device())->gather(list, input, root, opts.asyncOp, op_options(opts.timeout));
    return wrap(c10d::OpType::GATHER, {std::move(work)}, list);
  });
}

// --- Scattering --------------------------------------------------------------------------------

C10dWork BackendWrapper::scatter(Tensors& outputs, TensorLists& inputs,
                                 const c10d::ScatterOptions& opts) {
  return operation([&] {
    const int root = int_rank(opts.rootRank);
    const auto list = contiguous(root_list(inputs, root == getRank(), "scatter"));
    const auto& output = only(outputs, "scatter");
    auto work = comm_for(output.device())
                    ->scatter(output, list, root, opts.asyncOp, op_options(opts.timeout));
    return wrap(c10d::OpType::SCATTER, {std::move(work)}, outputs);
  });
}

C10dWork BackendWrapper::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                        const c10d::ReduceScatterOptions& opts) {
  return operation([&] {
    const auto list = contiguous(only(inputs, "reduce_scatter"));
    const auto& output = only(outputs, "reduce_scatter");
    const auto comm = comm_for(output.device());
    const auto op = from_c10d(opts.reduceOp);
    const auto options = op_options(opts.timeout);
    auto work = same_size(list) ? comm->reduce_scatter(output, list, op, opts.asyncOp, options)
                                : comm->reduce_scatter_v(output, list, op, opts.asyncOp, options);
    return wrap(c10d::OpType::REDUCE_SCATTER, {std::move(work)}, outputs);
  });
}

C10dWork BackendWrapper::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                              const c10d::ReduceScatterOptions& opts) {
  return operation([&] {
    auto work = comm_for(output.device())
                    ->reduce_scatter_single(output, input.contiguous(), from_c10d(opts.reduceOp),
                                            opts.asyncOp, op_options(opts.timeout));
    return wrap(c10d::OpType::_REDUCE_SCATTER_BASE, {std::move(work)}, {output});
  });
}

C10dWork BackendWrapper::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                         const c10d::ReduceScatterOptions& opts) {
  return operation([&] {
    check_pairs(outputs, inputs, "reduce_scatter_tensor_coalesced");
    const auto op = from_c10d(opts.reduceOp);
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < inputs.size(); ++i) {
      works.push_back(comm_for(outputs[i].device())
                          ->reduce_scatter_single(outputs[i], inputs[i].contiguous(), op,
                                                  opts.asyncOp, op_options(opts.timeout)));
    }
    return wrap(c10d::OpType::COALESCED, std::move(works), outputs);
  });
}

// --- All to all --------------------------------------------------------------------------------

C10dWork BackendWrapper::alltoall_base(at::Tensor& output, at::Tensor& input,
                                       std::vector<int64_t>& output_splits,
                                       std::vector<int64_t>& input_splits,
                                       const c10d::AllToAllOptions& opts) {
  return operation([&] {
    const auto comm = comm_for(input.device());
    const auto source = input.contiguous();
    const auto options = op_options(opts.timeout);
    const bool even = output_splits.empty() && input_splits.empty();
    auto work = even ? comm->all_to_all_single(output, source, opts.asyncOp, options)
                     : comm->all_to_all_v_single(output, source, output_splits, input_splits,
                                                 opts.asyncOp, options);
    return wrap(c10d::OpType::ALLTOALL_BASE, {std::move(work)}, {output});
  });
}

C10dWork BackendWrapper::alltoall(Tensors& outputs, Tensors& inputs,
                                  const c10d::AllToAllOptions& opts) {
  return operation([&] {
    check_pairs(outputs, inputs, "all_to_all");
    auto work =
        comm_for(inputs.front().device())
            ->all_to_all(outputs, contiguous(inputs), opts.asyncOp, op_options(opts.timeout));
    return wrap(c10d::OpType::ALLTOALL, {std::move(work)}, outputs);
  });
}

// --- Point to point ----------------------------------------------------------------------------

C10dWork BackendWrapper::point_to_point(P2POp::Type type, const at::Tensor& tensor, int peer,
                                        int tag) {
  const bool is_send = type == P2POp::Type::SEND;
  const std::string_view name = is_send ? "send" : "recv";
  if (tag != 0) {
    TORCH_WARN_ONCE(name, ": tag ", tag,
                    " is ignored; messages between two ranks match in the "
                    "order in which they are issued");
  }
  const auto memory = memory_of(tensor);
  if (is_coalescing()) {
    coalescing_.p2p.push_back({type, memory, peer});
    return nullptr;  // what endCoalescing returns stands for it
  }
  const auto [comm, peer_there] = comm_for_peer(tensor.device(), peer, name);
  const auto options = op_options(Ms(0));
  WorkParts parts;
  parts.type = is_send ? c10d::OpType::SEND : c10d::OpType::RECV;
  parts.works.push_back(is_send ? comm->send(memory, peer_there, /*async_op=*/true, options)
                                : comm->recv(memory, peer_there, /*async_op=*/true, options));
  parts.outputs = {tensor};
  if (!is_send) parts.source = peer;
  return wrap(std::move(parts));
}

C10dWork BackendWrapper::send(Tensors& tensors, int dst, int tag) {
  return operation(
      [&] { return point_to_point(P2POp::Type::SEND, only(tensors, "send"), dst, tag); });
}

C10dWork BackendWrapper::recv(Tensors& tensors, int src, int tag) {
  return operation(
      [&] { return point_to_point(P2POp::Type::RECV, only(tensors, "recv"), src, tag); });
}

C10dWork BackendWrapper::recvAnysource(Tensors& /*tensors*/, int /*tag*/) {
  return operation([&]() -> C10dWork {
    fail(ErrorKind::kUnsupported,
         "recv: expected a source rank, got none; torch_overlap cannot receive from any rank, pass "
         "src");
  });
}

// --- Barrier -----------------------------------------------------------------------------------

// The group's accelerator if it was used, or is asked for: a barrier then also waits for what runs
// there. Else CPU.
c10::Device BackendWrapper::barrier_device(const c10d::BarrierOptions& opts) const {
  if (fixed_) return fixed_->device();
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
    WorkParts parts;
    parts.type = c10d::OpType::BARRIER;
    parts.blocks_host = true;
    parts.works.push_back(
        comm_for(barrier_device(opts))->barrier(opts.asyncOp, op_options(opts.timeout)));
    return wrap(std::move(parts));
  });
}

}  // namespace torch_overlap
