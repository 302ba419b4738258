#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "torch_overlap/comm/backend.h"
#include "torch_overlap/comm/backends/nccl/handle.h"
#include "torch_overlap/symm/cuda/wait_board.h"
#include "torch_overlap/symm/remote_access.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {

// A part of a put: so many bytes that go to `offset` of the peer's tensor.
struct RemotePiece {
  const std::byte* from;
  size_t bytes;
  size_t offset;
  bool is_staged;  // copied to memory that NCCL knows before
};
using RemotePieces = c10::SmallVector<RemotePiece, 4>;
// What lies in [begin, begin + known) goes at once, other memory in pieces of at most `staging`
// bytes.
TORCH_OVERLAP_API RemotePieces remote_pieces(const void* from, size_t bytes, size_t offset,
                                             const void* begin, size_t known, size_t staging);

// Puts and signals of one window to ranks whose memory is not mapped, by NCCL's one-sided calls
// (2.29): copy engines among GPUs of an NVLink domain, else NCCL's proxy and the network.
//
//   put      from the window's own tensor: ncclPutSignal. From elsewhere: copied to the staging
//            memory, a piece at a time, and put from there.
//   signal   counts one up in the staging memory, and puts the count into the peer's signal pad,
//            where the kernel of wait_signal finds it as it finds any other.
//
// Why not NCCL's signals: there is one count for a communicator and a peer, which every put raises
// too; the wait for it has no end but the signal; and in a graph a put waits until the receiver has
// waited in the same graph for the one before.
//
// Order. ncclPutSignal has ended on its stream once the data, and NCCL's signal behind it, are at
// the peer. The lane of puts and signals (backend.h) runs one operation after another, so the
// staging memory has one user at a time, and a count comes after what was put before it.
//
// The native communicator is the window's own, made for it and not split off: that would ask for a
// parent with nothing outstanding, such as a wait for a signal.
//
// Threads: put() and signal() under the launch lock; the others any.
class TORCH_OVERLAP_API OneSided final : public RemoteAccess,
                                         public std::enable_shared_from_this<OneSided> {
 public:
  // Of a group of `size`, with the NCCL that is loaded.
  static Backend::RemoteSupport support(const NcclApi& api, int size);
  explicit OneSided(const SymmetricMemory& memory);
  // Collective, once, before all but stop() and close(). `context` is of the native communicator:
  // its name, and a store of its own. Bounded by its timeout for each step; an error of one rank is
  // thrown on every rank.
  void open(const NcclApi& api, const BackendContext& context, Bootstrap& bootstrap,
            std::string_view op, SymmetricMemory& memory);

  // `begun` becomes true when NCCL has taken something.
  void put(const void* from, size_t bytes, int dst, size_t offset, cudaStream_t stream,
           bool& begun);
  void signal(int dst, const cuda::WaitBoard& board, cudaStream_t stream, bool& begun);

  // Ends what runs, without asking others. A communicator that is being made ends once NCCL has
  // made it, or its timeout is over.
  void stop();
  void close(std::chrono::milliseconds limit) override;

 private:
  void require_running();
  void adopt(std::shared_ptr<NcclHandle> handle);
  std::shared_ptr<NcclHandle> adopted();
  void allocate();
  // Of a tensor in its allocation.
  struct Place {
    size_t offset = 0;
    size_t allocation_bytes = 0;
  };
  Place place() const;
  void exchange_places(Bootstrap& bootstrap, std::string_view op, const Place& mine);
  // Collective over the native communicator's ranks.
  void enter(const std::vector<int>& peers);
  ncclWindow_t add_window(void* data, size_t bytes);
  void put_from(const void* from, size_t bytes, int dst, ncclWindow_t window, size_t offset,
                cudaStream_t stream);
  std::byte* staging() const { return static_cast<std::byte*>(staging_.mutable_data_ptr()); }
  uint64_t* count_for(int dst) const;
  size_t counts_bytes() const;

  const c10::Device device_;
  const int rank_;
  const int size_;
  void* const data_;  // null for a tensor of no bytes
  const size_t bytes_;
  void* const pad_;
  std::vector<size_t> offsets_;  // of each rank's tensor in its allocation
  size_t allocation_bytes_ = 0;
  size_t staging_bytes_ = 0;  // behind the counts
  at::Tensor staging_;
  std::mutex stop_mutex_;
  bool is_stopped_ = false;
  std::shared_ptr<NcclHandle> handle_;  // set once, under stop_mutex_; operations come later
  ncclWindow_t data_window_ = nullptr;
  ncclWindow_t pad_window_ = nullptr;
};

}  // namespace torch_overlap
