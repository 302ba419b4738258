#include "torch_overlap/comm/backends/nccl/primitives.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "torch_overlap/comm/backends/nccl/reduction.h"
#include "torch_overlap/comm/composed.h"

namespace torch_overlap {
namespace {

constexpr int kMapsSegmentsSince = 22900;  // memory of several allocations

bool has_equal_parts(const Blocks& blocks) {
  return std::all_of(blocks.parts.begin(), blocks.parts.end(), [&](const at::Tensor& part) {
    return part.numel() == blocks.parts.front().numel();
  });
}

// Room for `count` parts of `numel` elements, one behind the other.
at::Tensor flat_room(const at::Tensor& like, int count) {
  return at::empty({count * like.numel()}, like.options());
}

}  // namespace

NcclPrimitives::Piece NcclPrimitives::source(const at::Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.nbytes()};  // NCCL only reads it
}

NcclPrimitives::Piece NcclPrimitives::target(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr(), tensor.nbytes()};
}

// Where torch's own memory can be mapped too (expandable segments), nothing is gained by a copy.
at::Tensor NcclPrimitives::room_for(const at::Tensor& tensor) const {
  if (!goes_apart_ || !is_mapped(tensor)) return {};
  auto room = at::empty(tensor.sizes(), tensor.options());
  if (!is_mapped(room)) return room;
  if (api_.version() < kMapsSegmentsSince) {
    TORCH_WARN_ONCE(
        "captured sends and receives: expected torch's allocator to give memory that NCCL does not "
        "map into the peer, got some that it does (expandable segments?); NCCL before 2.29 waits "
        "forever where one side lies in one segment and the other in two: set "
        "NCCL_GRAPH_REGISTER=0 before the first communicator");
  }
  return {};
}

bool NcclPrimitives::any_mapped(const Blocks& blocks) const {
  if (blocks.is_uniform_flat()) return is_mapped(blocks.flat);
  return std::any_of(blocks.parts.begin(), blocks.parts.end(),
                     [this](const at::Tensor& part) { return is_mapped(part); });
}

NcclPrimitives::Piece NcclPrimitives::sent(const at::Tensor& tensor) {
  const auto copy = room_for(tensor);
  if (!copy.defined()) return source(tensor);
  copy.copy_(tensor);
  copies_.push_back(copy);
  return source(copy);
}

NcclPrimitives::Piece NcclPrimitives::received(const at::Tensor& tensor) {
  const auto room = room_for(tensor);
  if (!room.defined()) return target(tensor);
  arrivals_.push_back({tensor, room});
  return target(room);
}

void NcclPrimitives::submit(NcclGroup& group) {
  group.end();
  begun_ = true;
  for (const auto& [tensor, room] : arrivals_) tensor.copy_(room);
  arrivals_.clear();
  copies_.clear();
}

template <typename Of>
NcclPrimitives::Pieces NcclPrimitives::pieces(const Blocks& blocks, const Of& of) const {
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

NcclPrimitives::Pieces NcclPrimitives::all_sent(const Blocks& blocks) {
  return pieces(blocks, [this](const at::Tensor& tensor) { return sent(tensor); });
}

NcclPrimitives::Pieces NcclPrimitives::all_received(const Blocks& blocks) {
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
  submitted(api_.broadcast(piece.data, piece.data, piece.bytes, ncclUint8, root, comm_, stream_),
            "ncclBroadcast");
}

void NcclPrimitives::all_reduce(const at::Tensor& tensor, const ReduceOp& op) {
  const auto native = nccl_reduction(tensor.scalar_type(), op);
  if (!native) {
    goes_apart_ = true;  // to and from memory of ours
    return composed_all_reduce(*this, tensor, op);
  }
  const NcclRedOp red_op(api_, comm_, *native, op);
  void* data = target(tensor).data;
  submitted(api_.all_reduce(data, data, tensor.numel() * native->elements_per_item, native->dtype,
                            red_op.get(), comm_, stream_),
            "ncclAllReduce");
}

void NcclPrimitives::reduce(const at::Tensor& tensor, const ReduceOp& op, int root) {
  const auto native = nccl_reduction(tensor.scalar_type(), op);
  if (!native) {
    goes_apart_ = true;  // to and from memory of ours
    return composed_reduce(*this, tensor, op, root);
  }
  const NcclRedOp red_op(api_, comm_, *native, op);
  void* data = target(tensor).data;  // NCCL writes to it at the root only
  submitted(api_.reduce(data, data, tensor.numel() * native->elements_per_item, native->dtype,
                        red_op.get(), root, comm_, stream_),
            "ncclReduce");
}

void NcclPrimitives::all_gather(const Blocks& out, const at::Tensor& tensor) {
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
  const at::Tensor flat = out.flat.defined() ? out.flat : flat_room(tensor, size());
  submitted(api_.all_gather(mine.data, target(flat).data, mine.bytes, ncclUint8, comm_, stream_),
            "ncclAllGather");
  if (out.flat.defined()) return;
  const auto rows = flat.view({size(), -1});
  for (int r = 0; r < size(); ++r) out.parts[r].view({-1}).copy_(rows[r]);
}

void NcclPrimitives::reduce_scatter(const at::Tensor& tensor, const Blocks& in,
                                    const ReduceOp& op) {
  const auto native = nccl_reduction(tensor.scalar_type(), op);
  if (!native) {
    goes_apart_ = true;  // to and from memory of ours
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
    flat = flat_room(tensor, size());
    const auto rows = flat.view({size(), -1});
    for (int r = 0; r < size(); ++r) rows[r].copy_(in.parts[r].view({-1}));
  }
  submitted(
      api_.reduce_scatter(source(flat).data, result, tensor.numel() * native->elements_per_item,
                          native->dtype, red_op.get(), comm_, stream_),
      "ncclReduceScatter");
}

void NcclPrimitives::all_to_all(const Blocks& out, const Blocks& in) {
  // One that is in place comes with a copy of what is sent.
  goes_apart_ = goes_apart_ || any_mapped(out) != any_mapped(in);
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
  submitted(api_.all_reduce(one_byte_, one_byte_, 1, ncclUint8, ncclMax, comm_, stream_),
            "ncclAllReduce");
}

void NcclPrimitives::scatter(const at::Tensor& tensor, const Blocks& in, int root) {
  const Piece to = received(tensor);
  const Pieces from = rank() == root ? all_sent(in) : Pieces{};
  NcclGroup group(api_);
  for (size_t r = 0; r < from.size(); ++r) send(from[r], static_cast<int>(r));
  recv(to, root);
  submit(group);
}

void NcclPrimitives::gather(const Blocks& out, const at::Tensor& tensor, int root) {
  const Piece from = sent(tensor);
  const Pieces to = rank() == root ? all_received(out) : Pieces{};
  NcclGroup group(api_);
  send(from, root);
  for (size_t r = 0; r < to.size(); ++r) recv(to[r], static_cast<int>(r));
  submit(group);
}

}  // namespace torch_overlap
