#pragma once

#include <c10/util/SmallVector.h>
#include <nccl.h>

#include <vector>

#include "torch_overlap/comm/backends/nccl/api.h"
#include "torch_overlap/comm/backends/nccl/runtime.h"
#include "torch_overlap/comm/primitives.h"

namespace torch_overlap {

// Which memory NCCL may map into the peers.
struct NcclMapping {
  bool (*is_mapped)(const void* data) = nullptr;  // whether it can be; null: NCCL maps nothing
  bool is_capture = false;
};

// What each operation is in NCCL calls, on one stream, which is also torch's current one: memory
// for staging and composed reductions comes from its pool. Lives for one launch, under the launch
// lock.
//
// Every rank must make the same NCCL calls. So the choice among forms rests only on what all ranks
// know alike, which is sizes and dtypes, never on whether this rank's tensors happen to lie in one
// piece:
//   all_gather, reduce_scatter   equal parts: ncclAllGather, ncclReduceScatter, through one flat
//                                buffer where the parts are apart; else a group of broadcasts or
//                                reductions, one for each rank.
//   all_to_all, gather, scatter  a group of sends and receives. ncclAlltoAll, ncclGather and
//                                ncclScatter (2.28) are that same group inside, and need a flat
//                                buffer on every rank.
//
// Mapped memory. NCCL maps the memory of a send or a receive into the peer where it can be mapped:
// in a capture by itself, else if it was registered. It asks nobody whether the other side's is: a
// send from such memory to a receive into other memory waits forever, the reverse delivers nothing.
// That begins where messages are too large for its protocol LL: over NVLink up to 512 KB in 2.28,
// 16 KB in 2.29. So in a capture sends and receives go through memory that it leaves alone; else
// they do where one side is memory of ours. What the caller registers is so on both sides.
class TORCH_OVERLAP_API NcclPrimitives final : public Primitives {
 public:
  // `one_byte`: device memory for barrier().
  // `runtime`, `timeout`: for windows.
  NcclPrimitives(const NcclApi& api, ncclComm_t comm, int rank, int size, void* one_byte,
                 cudaStream_t stream, CommRuntime* runtime = nullptr, Milliseconds timeout = {},
                 NcclMapping mapping = {})
      : Primitives(rank, size),
        api_(api),
        comm_(comm),
        one_byte_(one_byte),
        stream_(stream),
        runtime_(runtime),
        timeout_(timeout),
        is_mapped_(mapping.is_mapped),
        goes_apart_(mapping.is_capture) {}

  void p2p(const std::vector<P2POp>& ops) override;
  void broadcast(const at::Tensor& tensor, int root) override;
  void all_reduce(const at::Tensor& tensor, const ReduceOp& op) override;
  void reduce(const at::Tensor& tensor, const ReduceOp& op, int root) override;
  void all_gather(const Blocks& out, const at::Tensor& tensor) override;
  void reduce_scatter(const at::Tensor& tensor, const Blocks& in, const ReduceOp& op) override;
  void all_to_all(const Blocks& out, const Blocks& in) override;
  void barrier() override;
  void scatter(const at::Tensor& tensor, const Blocks& in, int root) override;
  void gather(const Blocks& out, const at::Tensor& tensor, int root) override;
  // Copies and counts in the memory of the peer, without NCCL, or through it (window_ops.cpp).
  void put(SymmetricMemory& window, const at::Tensor& tensor, int dst, int64_t offset) override;
  void signal(SymmetricMemory& window, int dst) override;
  void wait_signal(SymmetricMemory& window, int src, uint64_t ticket) override;

  // NCCL took something: after an error the operation is half done on this rank.
  bool has_begun() const { return begun_; }

 private:
  // A contiguous piece of device memory.
  struct Piece {
    void* data;
    size_t bytes;
  };
  using Pieces = c10::SmallVector<Piece, 8>;
  // To read from, and to write to: asking to write makes a lazy clone real. Ask outside of groups.
  static Piece source(const at::Tensor& tensor);
  static Piece target(const at::Tensor& tensor);
  // Of sends and receives: perhaps a copy, or room for what is copied by submit().
  Piece sent(const at::Tensor& tensor);
  Piece received(const at::Tensor& tensor);
  at::Tensor room_for(const at::Tensor& tensor) const;
  bool is_mapped(const at::Tensor& tensor) const {
    return is_mapped_ != nullptr && tensor.numel() > 0 && is_mapped_(tensor.const_data_ptr());
  }
  bool any_mapped(const Blocks& blocks) const;
  // One for each rank.
  template <typename Of>
  Pieces pieces(const Blocks& blocks, const Of& of) const;
  Pieces all_sent(const Blocks& blocks);
  Pieces all_received(const Blocks& blocks);

  // Of a call outside of groups, and of a whole group: what NCCL has taken is on its way.
  void submitted(ncclResult_t result, std::string_view what) {
    nccl_check(api_, result, what);
    begun_ = true;
  }
  void submit(NcclGroup& group);

  // Inside a group. Nothing is sent for a piece of no bytes; the peer's has none either.
  void send(Piece piece, int peer);
  void recv(Piece piece, int peer);

  const NcclApi& api_;
  ncclComm_t comm_;
  void* one_byte_;
  cudaStream_t stream_;
  CommRuntime* runtime_;
  Milliseconds timeout_;
  bool (*const is_mapped_)(const void* data);
  bool goes_apart_;  // what is mapped
  // Of the next group.
  struct Arrival {
    at::Tensor tensor;
    at::Tensor room;
  };
  std::vector<Arrival> arrivals_;
  std::vector<at::Tensor> copies_;
  bool begun_ = false;
};

}  // namespace torch_overlap
