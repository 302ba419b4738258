#pragma once

#include <c10/util/SmallVector.h>
#include <nccl.h>

#include <vector>

#include "torch_overlap/comm/backends/nccl/api.h"
#include "torch_overlap/comm/backends/nccl/runtime.h"
#include "torch_overlap/comm/primitives.h"

namespace torch_overlap {

// Memory that NCCL may map into the peers.
struct NcclMapping {
  bool (*is_mapped)(const void* data) = nullptr;  // true if NCCL can map it; null: it maps nothing
  bool is_capture = false;                        // NCCL maps the tensors of the call by itself
};

// Implements each primitive by NCCL calls on one stream. The stream is also torch's current one:
// memory for staging and composed reductions comes from its pool. Lives for one launch, under the
// launch lock.
//
// Every rank must make the same NCCL calls. The form therefore depends only on values that are
// equal on all ranks, which are sizes and dtypes, never on this rank's tensors being contiguous in
// memory:
//   all_gather, reduce_scatter   equal parts: ncclAllGather, ncclReduceScatter, through one flat
//                                buffer if the parts are separate tensors; otherwise a group of
//                                broadcasts or reductions, one per rank.
//   all_to_all, gather, scatter  a group of sends and receives. ncclAlltoAll, ncclGather and
//                                ncclScatter (2.28) run the same group, and need a flat buffer on
//                                every rank.
//
// Mapped memory. NCCL maps the memory of a send or a receive into the peer if it can be mapped: in
// a capture by itself, otherwise if it was registered. It does not check the other side's memory: a
// send from mapped memory to a receive into other memory waits forever, and the reverse delivers
// nothing. This concerns messages too large for NCCL's LL protocol, whose limit over NVLink is
// 512 KB in 2.28 and 16 KB in 2.29. In a capture, sends and receives therefore go through memory
// that NCCL does not map; outside of captures they do if one side is memory of this project. Memory
// that the caller registers is expected to be registered on both sides.
class TORCH_OVERLAP_API NcclPrimitives final : public Primitives {
 public:
  // `barrier_buffer` is device memory for barrier().
  // `runtime` and `timeout` are for windows.
  NcclPrimitives(const NcclApi& api, ncclComm_t comm, int rank, int size, void* barrier_buffer,
                 cudaStream_t stream, CommRuntime* runtime = nullptr, Milliseconds timeout = {},
                 NcclMapping mapping = {})
      : Primitives(rank, size),
        api_(api),
        comm_(comm),
        barrier_buffer_(barrier_buffer),
        stream_(stream),
        runtime_(runtime),
        timeout_(timeout),
        is_mapped_(mapping.is_mapped),
        should_stage_(mapping.is_capture) {}

  void p2p(const std::vector<P2POp>& ops) override;
  void broadcast(const at::Tensor& tensor, int root) override;
  void all_reduce(const at::Tensor& tensor, const ReduceOp& op) override;
  void reduce(const at::Tensor& tensor, const ReduceOp& op, int root) override;
  void all_gather(const RankTensors& out, const at::Tensor& tensor) override;
  void reduce_scatter(const at::Tensor& tensor, const RankTensors& in, const ReduceOp& op) override;
  void all_to_all(const RankTensors& out, const RankTensors& in) override;
  void barrier() override;
  void scatter(const at::Tensor& tensor, const RankTensors& in, int root) override;
  void gather(const RankTensors& out, const at::Tensor& tensor, int root) override;
  // Copies and counts in the memory of the peer, without NCCL or through it (window_ops.cpp).
  void put(SymmetricMemory& window, const at::Tensor& tensor, int dst, int64_t offset) override;
  void signal(SymmetricMemory& window, int dst) override;
  void wait_signal(SymmetricMemory& window, int src, uint64_t ticket) override;

  // True once NCCL has accepted a call: after an error the operation is incomplete on this rank.
  bool has_launched() const { return has_launched_; }

 private:
  // A contiguous range of device memory.
  struct Piece {
    void* data;
    size_t bytes;
  };
  using Pieces = c10::SmallVector<Piece, 8>;
  // Return the memory to read from, or to write to. target() materializes a lazy clone. Must be
  // called outside of groups.
  static Piece source(const at::Tensor& tensor);
  static Piece target(const at::Tensor& tensor);
  // Return the memory of a send or a receive: the tensor's, or a staging buffer. sent() copies into
  // it, submit() copies out of it.
  Piece sent(const at::Tensor& tensor);
  Piece received(const at::Tensor& tensor);
  at::Tensor make_staging(const at::Tensor& tensor) const;
  bool is_mapped(const at::Tensor& tensor) const {
    return is_mapped_ != nullptr && tensor.numel() > 0 && is_mapped_(tensor.const_data_ptr());
  }
  bool any_mapped(const RankTensors& blocks) const;
  // Returns one piece per rank.
  template <typename Of>
  Pieces pieces(const RankTensors& blocks, const Of& of) const;
  Pieces all_sent(const RankTensors& blocks);
  Pieces all_received(const RankTensors& blocks);

  // Record that NCCL has accepted a call outside of groups, or a whole group.
  void check_and_set_launched(ncclResult_t result, std::string_view what) {
    nccl_check(api_, result, what);
    has_launched_ = true;
  }
  void submit(NcclGroup& group);

  // Called inside a group. Nothing is sent for a piece of no bytes; the peer's has none either.
  void send(Piece piece, int peer);
  void recv(Piece piece, int peer);

  const NcclApi& api_;
  ncclComm_t comm_;
  void* barrier_buffer_;
  cudaStream_t stream_;
  CommRuntime* runtime_;
  Milliseconds timeout_;
  bool (*const is_mapped_)(const void* data);
  bool should_stage_;  // sends and receives of mapped memory go through staging buffers
  // Copies of the next group.
  struct PendingCopy {
    at::Tensor tensor;
    at::Tensor staging;
  };
  std::vector<PendingCopy> pending_copies_;
  std::vector<at::Tensor> send_copies_;
  bool has_launched_ = false;
};

}  // namespace torch_overlap
