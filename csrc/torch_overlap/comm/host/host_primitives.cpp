#include "torch_overlap/comm/host/host_primitives.h"

#include <cstring>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/composed.h"

namespace torch_overlap {
namespace {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

// Larger broadcasts are a scatter and an all-gather: the root sends 2 (n-1)/n times the bytes
// instead of n-1 times.
constexpr size_t kMinScatterBroadcastBytes = 256 * 1024;

ConstBytes read(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

Bytes write(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()};
}

// Uses memmove, because the spans may overlap; copies nothing if the bytes are in place already.
void copy(Bytes to, ConstBytes from) {
  if (!from.empty() && to.data() != from.data()) std::memmove(to.data(), from.data(), from.size());
}

// Returns the bytes of each rank's part without making a tensor per part.
template <typename Span, typename View>
std::vector<Span> parts_of(const RankTensors& blocks, int size, const View& view) {
  std::vector<Span> parts(size);
  if (blocks.is_uniform_flat()) {
    const Span all = view(blocks.flat);
    const size_t length = all.size() / size;
    for (int r = 0; r < size; ++r) parts[r] = all.subspan(r * length, length);
  } else {
    for (int r = 0; r < size; ++r) parts[r] = view(blocks.parts[r]);
  }
  return parts;
}

std::vector<Bytes> write_parts(const RankTensors& blocks, int size) {
  return parts_of<Bytes>(blocks, size, write);
}

std::vector<ConstBytes> read_parts(const RankTensors& blocks, int size) {
  return parts_of<ConstBytes>(blocks, size, read);
}

}  // namespace

void HostPrimitives::send(int peer, ConstBytes bytes) { post(true, peer, bytes); }

void HostPrimitives::recv(int peer, Bytes bytes) { post(false, peer, bytes); }

void HostPrimitives::post(bool is_send, int peer, ConstBytes bytes, int tag) {
  if (bytes.empty()) return;  // the peer knows the size too and skips the message as well
  has_started_ = true;
  const auto kind = primitive_ == Primitive::p2p ? MessageKind::p2p : MessageKind::collective;
  // Message has one span type for both directions; a send only reads it.
  const Bytes memory{const_cast<std::byte*>(bytes.data()), bytes.size()};
  const Message message{peer, kind, primitive_, memory, tag};
  try {
    pending_.push_back({peer, transport_.post(message, is_send)});
  } catch (...) {
    pending_.clear();  // cancels the transfers while the caller's buffers are alive
    throw;
  }
}

void HostPrimitives::wait_all() {
  const auto posted = std::exchange(pending_, {});  // destroyed, and so cancelled, on every exit
  for (const Pending& waited : posted) {
    bool has_arrived = false;
    try {
      has_arrived = waited.transfer->wait(deadline_);
    } catch (const Error&) {
      if (waited.peer != kAnySource) missing_.insert(waited.peer);
      throw;
    }
    if (has_arrived) {
      if (waited.peer == kAnySource) source_ = waited.transfer->peer();
      continue;
    }
    TORCH_OVERLAP_CHECK(waited.peer != kAnySource, kTimeout,
                        "no rank sent a message within the timeout of ", timeout_.count(), " ms");
    missing_.insert(waited.peer);
    for (const Pending& other : posted) {
      if (other.transfer->is_missing()) missing_.insert(other.peer);
    }
    const auto who = missing_.size() == 1 ? concat("rank ", waited.peer)
                                          : concat("ranks ", list_string(missing_));
    fail(ErrorKind::kTimeout, who, " did not arrive within the timeout of ", timeout_.count(),
         " ms");
  }
}

void HostPrimitives::p2p(const std::vector<P2POp>& ops) {
  primitive_ = Primitive::p2p;
  std::vector<ConstBytes> to_self;
  std::vector<Bytes> from_self;
  for (const P2POp& op : ops) {
    const bool is_send = op.type == P2POp::Type::SEND;
    if (op.peer == rank()) {
      is_send ? to_self.push_back(read(op.tensor)) : from_self.push_back(write(op.tensor));
    } else {
      post(is_send, op.peer, is_send ? read(op.tensor) : ConstBytes(write(op.tensor)), op.tag);
    }
  }
  for (size_t i = 0; i < to_self.size(); ++i) copy(from_self[i], to_self[i]);
  wait_all();
}

void HostPrimitives::broadcast(const at::Tensor& tensor, int root) {
  primitive_ = Primitive::broadcast;
  const Bytes bytes = write(tensor);
  if (size() == 1) return;
  if (size() == 2 || bytes.size() <= kMinScatterBroadcastBytes) {
    if (rank() != root) {
      recv(root, bytes);
    } else {
      for (int r = 0; r < size(); ++r) {
        if (r != root) send(r, bytes);
      }
    }
    return wait_all();
  }
  const size_t length = bytes.size() / size();
  const auto chunk = [&](int r) {
    return r == size() - 1 ? bytes.subspan(r * length) : bytes.subspan(r * length, length);
  };
  if (rank() != root) {
    recv(root, chunk(rank()));
  } else {
    for (int r = 0; r < size(); ++r) {
      if (r != root) send(r, chunk(r));
    }
  }
  wait_all();
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    if (r != root) send(r, chunk(rank()));
    if (rank() != root) recv(r, chunk(r));
  }
  wait_all();
}

void HostPrimitives::all_gather(const RankTensors& out, const at::Tensor& tensor) {
  primitive_ = Primitive::all_gather;
  const auto parts = write_parts(out, size());
  const ConstBytes mine = read(tensor);
  for (int step = 1; step < size(); ++step) {
    const int to = (rank() + step) % size();
    const int from = (rank() + size() - step) % size();
    send(to, mine);
    recv(from, parts[from]);
  }
  copy(parts[rank()], mine);
  wait_all();
}

void HostPrimitives::all_to_all(const RankTensors& out, const RankTensors& in) {
  primitive_ = Primitive::all_to_all;
  const auto to_parts = write_parts(out, size());
  const auto from_parts = read_parts(in, size());
  copy(to_parts[rank()], from_parts[rank()]);
  for (int step = 1; step < size(); ++step) {
    const int to = (rank() + step) % size();
    const int from = (rank() + size() - step) % size();
    send(to, from_parts[to]);
    recv(from, to_parts[from]);
  }
  wait_all();
}

void HostPrimitives::barrier() {
  primitive_ = Primitive::barrier;
  std::byte token{};
  std::vector<std::byte> tokens(size());
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    send(r, {&token, 1});
    recv(r, {&tokens[r], 1});
  }
  wait_all();
}

void HostPrimitives::scatter(const at::Tensor& tensor, const RankTensors& in, int root) {
  primitive_ = Primitive::scatter;
  const Bytes mine = write(tensor);
  if (rank() != root) {
    recv(root, mine);
    return wait_all();
  }
  const auto parts = read_parts(in, size());
  for (int r = 0; r < size(); ++r) {
    if (r != root) send(r, parts[r]);
  }
  wait_all();
  copy(mine, parts[root]);  // last: the output may alias a part that is sent
}

void HostPrimitives::gather(const RankTensors& out, const at::Tensor& tensor, int root) {
  primitive_ = Primitive::gather;
  const ConstBytes mine = read(tensor);
  if (rank() != root) {
    send(root, mine);
    return wait_all();
  }
  const auto parts = write_parts(out, size());
  copy(parts[root], mine);  // first: the input may alias a part that is received
  for (int r = 0; r < size(); ++r) {
    if (r != root) recv(r, parts[r]);
  }
  wait_all();
}

void HostPrimitives::all_reduce(const at::Tensor& tensor, const ReduceOp& op) {
  composed_all_reduce(*this, tensor, op);
}

void HostPrimitives::reduce(const at::Tensor& tensor, const ReduceOp& op, int root) {
  composed_reduce(*this, tensor, op, root);
}

void HostPrimitives::reduce_scatter(const at::Tensor& tensor, const RankTensors& in,
                                    const ReduceOp& op) {
  composed_reduce_scatter(*this, tensor, in, op);
}

}  // namespace torch_overlap
