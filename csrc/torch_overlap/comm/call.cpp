#include "torch_overlap/comm/call.h"

#include <array>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

constexpr std::array<std::string_view, kNumOpNames> kNames{"send",
                                                           "recv",
                                                           "broadcast",
                                                           "all_reduce",
                                                           "all_reduce_rms_norm",
                                                           "reduce",
                                                           "all_gather",
                                                           "all_gather_v",
                                                           "all_gather_single",
                                                           "reduce_scatter",
                                                           "reduce_scatter_v",
                                                           "reduce_scatter_single",
                                                           "all_to_all",
                                                           "all_to_all_single",
                                                           "all_to_all_v_single",
                                                           "barrier",
                                                           "scatter",
                                                           "gather",
                                                           "gather_single",
                                                           "batch_op_issue",
                                                           "split",
                                                           "new_window",
                                                           "finalize",
                                                           "put",
                                                           "signal",
                                                           "wait_signal"};

constexpr std::array<std::string_view, 13> kPrimitiveNames{
    "send/recv", "broadcast", "all_reduce", "reduce", "all_gather", "reduce_scatter", "all_to_all",
    "barrier",   "scatter",   "gather",     "put",    "signal",     "wait_signal"};

}  // namespace

std::string_view to_string(OpName name) { return kNames.at(static_cast<size_t>(name)); }

std::string_view to_string(Primitive primitive) {
  return kPrimitiveNames.at(static_cast<size_t>(primitive));
}

at::Tensor RankTensors::part(int rank, int size) const {
  if (!parts.empty()) return parts.at(rank);
  // The parts are equal, so part `rank` is a slice of the flattened tensor. Shapes no longer matter
  // once the call is validated.
  const int64_t numel = flat.numel() / size;
  return flat.view({-1}).narrow(0, rank * numel, numel);
}

std::vector<at::Tensor> RankTensors::all(int size) const {
  if (!parts.empty() || empty()) return parts;
  std::vector<at::Tensor> out;
  out.reserve(size);
  for (int rank = 0; rank < size; ++rank) out.push_back(part(rank, size));
  return out;
}

Call::Tensors Call::tensors() const {
  Tensors kept;
  for_each_tensor([&kept](const at::Tensor& tensor) { kept.push_back(tensor); });
  return kept;
}

void Call::detach_tensors() {
  const auto detach = [](at::Tensor& value) {
    if (value.defined() && value.requires_grad()) value = value.detach();
  };
  detach(tensor);
  for (RankTensors* const tensors : {&in, &out}) {
    detach(tensors->flat);
    for (at::Tensor& part : tensors->parts) detach(part);
  }
  for (P2POp& op : p2p) detach(op.tensor);
  bool is_norm_in_graph = false;
  if (norm) {
    RmsNorm::for_each_tensor(*norm, [&](const at::Tensor& value) {
      is_norm_in_graph = is_norm_in_graph || (value.defined() && value.requires_grad());
    });
  }
  if (is_norm_in_graph) {
    auto detached = std::make_shared<RmsNorm>(*norm);
    RmsNorm::for_each_tensor(*detached, detach);
    norm = std::move(detached);
  }
}

void Call::bump_versions(int rank) const {
  const auto bump = [](const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  };
  const auto bump_out = [&] {
    if (out.parts.empty()) return bump(out.flat);
    for (const auto& part : out.parts) bump(part);
  };
  switch (primitive) {
    case Primitive::all_reduce:
      bump(tensor);
      if (norm) {
        for (const auto* written :
             {&norm->residual_out, &norm->quantization.data, &norm->quantization.scale_inv}) {
          bump(*written);
        }
      }
      return;
    case Primitive::reduce_scatter:
    case Primitive::scatter:
      return bump(tensor);
    case Primitive::broadcast:
      if (rank != root) bump(tensor);
      return;
    case Primitive::reduce:
      if (rank == root) bump(tensor);
      return;
    case Primitive::all_gather:
    case Primitive::all_to_all:
    case Primitive::gather:  // has outputs only on the root
      return bump_out();
    case Primitive::p2p:
      for (const auto& op : p2p) {
        if (op.type == P2POp::Type::RECV) bump(op.tensor);
      }
      return;
    case Primitive::barrier:
    case Primitive::put:
    case Primitive::signal:
    case Primitive::wait_signal:
      return;
  }
}

std::string Call::describe() const {
  return concat(to_string(name), " #", sequence, " on '", comm, "'");
}

}  // namespace torch_overlap
