#include "torch_overlap/comm/backends/nccl/primitives.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "torch_overlap/comm/backends/nccl/reduction.h"
#include "torch_overlap/comm/composed.h"

namespace torch_overlap {
namespace {

constexpr int kMultiSegmentMinVersion = 22900;  // supports buffers that span allocations

bool has_equal_parts(const RankTensors& blocks) {
  return std::all_of(blocks.parts.begin(), blocks.parts.end(), [&](const at::Tensor& part) {
    return part.numel() == blocks.parts.front().numel();
  });
}

// Allocates one buffer for `count` parts with the size of `like`.
at::Tensor make_flat_buffer(const at::Tensor& like, int count) {
  return at::empty({count * like.numel()}, like.options());
}

}  // namespace

NcclPrimitives::Piece NcclPrimitives::source(const at::Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.nbytes()};  // NCCL only reads it
}

NcclPrimitives::Piece NcclPrimitives::target(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr(), tensor.nbytes()};
}

// If torch's own memory can be mapped too (expandable segments), a copy would gain nothing.
at::Tensor NcclPrimitives::make_staging(const at::Tensor& tensor) const {
  if (!should_stage_ || !is_mapped(tensor)) return {};
  auto staging = at::empty(tensor.sizes(), tensor.options());
  if (!is_mapped(staging)) return staging;
  if (api_.version() < kMultiSegmentMinVersion) {
    TORCH_WARN_ONCE(
        "captured sends and receives: expected torch's allocator to give memory that NCCL does not "
        "map into the peer, got some that it does (expandable segments?); NCCL before 2.29 waits "
        "forever where one side lies in one segment and the other in two: set "
        "NCCL_GRAPH_REGISTER=0 before the first communicator");
  }
  return {};
}

bool NcclPrimitives::any_mapped(const RankTensors& blocks) const {
  if (blocks.is_uniform_flat()) return is_mapped(blocks.flat);
  return std::any_of(blocks.parts.begin(), blocks.parts.end(),
                     [this](const at::Tensor& part) { return is_mapped(part); });
}

NcclPrimitives::Piece NcclPrimitives::sent(const at::Tensor& tensor) {
  const auto copy = make_staging(tensor);
  if (!copy.defined()) return source(tensor);
  copy.copy_(tensor);
  send_copies_.push_back(copy);
  return source(copy);
}

NcclPrimitives::Piece NcclPrimitives::received(const at::Tensor& tensor) {
  const auto staging = make_staging(tensor);
  if (!staging.defined()) return target(tensor);
  pending_copies_.push_back({tensor, staging});
  return target(staging);
}

void NcclPrimitives::submit(NcclGroup& group) {
  group.end();
  has_launched_ = true;
  for (const auto& [tensor, staging] : pending_copies_) tensor.copy_(staging);
  pending_copies_.clear();
  send_copies_.clear();
}

template <typename Of>
NcclPrimitives::Pieces NcclPrimitives::pieces(const RankTensors& blocks, const Of& of) const {
  Pieces pieces;
  for (const auto& part : blocks.parts) pieces.push_back(of(part));
  if (blocks.is_uniform_flat()) {
    const Piece whole = of(blocks.flat);
    const size_t bytes = whole.bytes / size();
    for (int r = 0; r < size(); ++r) {
      pieces.push_back({static_cast<char*>(whole.data) + r * bytes, bytes});
    }
  }
  return pieces;
}

NcclPrimitives::Pieces NcclPrimitives::all_sent(const RankTensors& blocks) {
  return pieces(blocks, [this](const at::Tensor& tensor) { return sent(tensor); });
}

NcclPrimitives::Pieces NcclPrimitives::all_received(const RankTensors& blocks) {
  return pieces(blocks, [this](const at::Tensor& tensor) { return received(tensor); });
}

void NcclPrimitives::send(Piece piece, int peer) {
  if (piece.bytes == 0) return;
  nccl_check(api_, api_.send(piece.data, piece.bytes, ncclUint8, peer, comm_, stream_), "ncclSend");
}

void NcclPrimitives::recv(Piece piece, int peer) {
  if (piece.bytes == 0) return;
  nccl_check(api_, api_.recv(piece.data, piece.bytes, ncclUint8, peer, comm_, stream_), "ncclRecv");
}

void NcclPrimitives::p2p(const std::vector<P2POp>& ops) {
  Pieces pieces;
  for (const P2POp& op : ops) {
    pieces.push_back(op.type == P2POp::Type::SEND ? sent(op.tensor) : received(op.tensor));
  }
  NcclGroup group(api_);
  for (size_t i = 0; i < ops.size(); ++i) {
    if (ops[i].type == P2POp::Type::SEND) {
      send(pieces[i], ops[i].peer);
    } else {
      recv(pieces[i], ops[i].peer);
    }
  }
  submit(group);
}

void NcclPrimitives::broadcast(const at::Tensor& tensor, int root) {
  const Piece piece = target(tensor);
  check_and_set_launched(
      api_.broadcast(piece.data, piece.data, piece.bytes, ncclUint8, root, comm_, stream_),
      "ncclBroadcast");
}

void NcclPrimitives::all_reduce(const at::Tensor& tensor, const ReduceOp& op) {
  const auto native = nccl_reduction(tensor.scalar_type(), op, size());
  if (!native) {
    should_stage_ = true;  // the composition exchanges internal buffers
    return composed_all_reduce(*this, tensor, op);
  }
  const NcclRedOp red_op(api_, comm_, *native, op);
  void* data = target(tensor).data;
  check_and_set_launched(api_.all_reduce(data, data, tensor.numel() * native->elements_per_item,
                                         native->dtype, red_op.get(), comm_, stream_),
                         "ncclAllReduce");
}

void NcclPrimitives::reduce(const at::Tensor& tensor, const ReduceOp& op, int root) {
  const auto native = nccl_reduction(tensor.scalar_type(), op, size());
  if (!native) {
    should_stage_ = true;  // the composition exchanges internal buffers
    return composed_reduce(*this, tensor, op, root);
  }
  const NcclRedOp red_op(api_, comm_, *native, op);
  void* data = target(tensor).data;  // NCCL writes to it at the root only
  check_and_set_launched(api_.reduce(data, data, tensor.numel() * native->elements_per_item,
                                     native->dtype, red_op.get(), root, comm_, stream_),
                         "ncclReduce");
}

void NcclPrimitives::all_gather(const RankTensors& out, const at::Tensor& tensor) {
  const Piece mine = source(tensor);
  if (!has_equal_parts(out)) {
    const Pieces to = pieces(out, target);
    NcclGroup group(api_);
    for (int r = 0; r < size(); ++r) {
      const void* from = r == rank() ? mine.data : to[r].data;
      nccl_check(api_, api_.broadcast(from, to[r].data, to[r].bytes, ncclUint8, r, comm_, stream_),
                 "ncclBroadcast");
    }
    return submit(group);
  }
  if (mine.bytes == 0) return;
  const at::Tensor flat = out.flat.defined() ? out.flat : make_flat_buffer(tensor, size());
  check_and_set_launched(
      api_.all_gather(mine.data, target(flat).data, mine.bytes, ncclUint8, comm_, stream_),
      "ncclAllGather");
  if (out.flat.defined()) return;
  const auto rows = flat.view({size(), -1});
  for (int r = 0; r < size(); ++r) out.parts[r].view({-1}).copy_(rows[r]);
}

void NcclPrimitives::reduce_scatter(const at::Tensor& tensor, const RankTensors& in,
                                    const ReduceOp& op) {
  const auto native = nccl_reduction(tensor.scalar_type(), op, size());
  if (!native) {
    should_stage_ = true;  // the composition exchanges internal buffers
    return composed_reduce_scatter(*this, tensor, in, op);
  }
  const NcclRedOp red_op(api_, comm_, *native, op);
  void* result = target(tensor).data;
  if (!has_equal_parts(in)) {
    const Pieces from = pieces(in, source);
    NcclGroup group(api_);
    for (int r = 0; r < size(); ++r) {
      // NCCL writes to the second pointer at the root only.
      nccl_check(api_,
                 api_.reduce(from[r].data, r == rank() ? result : from[r].data,
                             in.parts[r].numel() * native->elements_per_item, native->dtype,
                             red_op.get(), r, comm_, stream_),
                 "ncclReduce");
    }
    return submit(group);
  }
  if (tensor.numel() == 0) return;
  at::Tensor flat = in.flat;
  if (!flat.defined()) {
    flat = make_flat_buffer(tensor, size());
    const auto rows = flat.view({size(), -1});
    for (int r = 0; r < size(); ++r) rows[r].copy_(in.parts[r].view({-1}));
  }
  check_and_set_launched(
      api_.reduce_scatter(source(flat).data, result, tensor.numel() * native->elements_per_item,
                          native->dtype, red_op.get(), comm_, stream_),
      "ncclReduceScatter");
}

void NcclPrimitives::all_to_all(const RankTensors& out, const RankTensors& in) {
  // An in-place call passes a copy of the data to send, which may not be mapped.
  should_stage_ = should_stage_ || any_mapped(out) != any_mapped(in);
  const Pieces to = all_received(out);
  const Pieces from = all_sent(in);
  NcclGroup group(api_);
  for (int r = 0; r < size(); ++r) {
    send(from[r], r);
    recv(to[r], r);
  }
  submit(group);
}

void NcclPrimitives::barrier() {
  check_and_set_launched(
      api_.all_reduce(barrier_buffer_, barrier_buffer_, 1, ncclUint8, ncclMax, comm_, stream_),
      "ncclAllReduce");
}

void NcclPrimitives::scatter(const at::Tensor& tensor, const RankTensors& in, int root) {
  const Piece to = received(tensor);
  const Pieces from = rank() == root ? all_sent(in) : Pieces{};
  NcclGroup group(api_);
  for (size_t r = 0; r < from.size(); ++r) send(from[r], static_cast<int>(r));
  recv(to, root);
  submit(group);
}

void NcclPrimitives::gather(const RankTensors& out, const at::Tensor& tensor, int root) {
  const Piece from = sent(tensor);
  const Pieces to = rank() == root ? all_received(out) : Pieces{};
  NcclGroup group(api_);
  send(from, root);
  for (size_t r = 0; r < to.size(); ++r) recv(to[r], static_cast<int>(r));
  submit(group);
}

}  // namespace torch_overlap
