#include "torch_overlap/comm/host/staging.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace torch_overlap {

at::Tensor Staging::move(const at::Tensor& tensor, bool is_input, bool is_output, int peer,
                         int tag) {
  if (!tensor.defined()) return tensor;
  at::Tensor host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  if (is_input) host.copy_(tensor);
  if (is_output) {
    results_.push_back({tensor, host, peer, tag});
  } else {
    sources_.push_back(tensor);
  }
  return host;
}

void Staging::move(RankTensors& blocks, bool is_output) {
  if (blocks.is_uniform_flat()) {
    blocks.flat = move(blocks.flat, !is_output, is_output);
    return;
  }
  blocks.flat.reset();
  for (auto& part : blocks.parts) part = move(part, !is_output, is_output);
}

std::unique_ptr<Staging> Staging::to_host(Call& call, int rank, c10::Device device) {
  if (device.is_cpu()) return nullptr;
  const at::AutoDispatchBelowADInplaceOrView plain;
  const c10::DeviceGuard guard(device);
  // Needed also if the operation only writes: work on the stream may still read the old contents.
  c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  auto staging = std::make_unique<Staging>();
  const Primitive kind = call.primitive;
  const bool at_root = call.root == rank;
  const bool only_output = kind == Primitive::reduce_scatter || kind == Primitive::scatter ||
                           (kind == Primitive::broadcast && !at_root);
  const bool only_input = kind == Primitive::all_gather || kind == Primitive::gather ||
                          (kind == Primitive::broadcast && at_root) ||
                          (kind == Primitive::reduce && !at_root);
  call.tensor = staging->move(call.tensor, !only_output, !only_input);
  staging->move(call.in, /*is_output=*/false);
  staging->move(call.out, /*is_output=*/true);
  for (auto& op : call.p2p) {
    const bool is_send = op.type == P2POp::Type::SEND;
    op.tensor = staging->move(op.tensor, is_send, !is_send, op.peer, op.tag);
  }
  if (const auto* factor = std::get_if<at::Tensor>(&call.reduce_op.factor())) {
    call.reduce_op = ReduceOp::premul_sum(factor->cpu());
  }
  return staging;
}

void Staging::write_back() const {
  for (const Pair& pair : results_) pair.device.copy_(pair.host);
}

void Staging::write_back_from(int peer, int tag) const {
  for (const Pair& pair : results_) {
    if (pair.peer == peer && pair.tag == tag) pair.device.copy_(pair.host);
  }
}

}  // namespace torch_overlap
