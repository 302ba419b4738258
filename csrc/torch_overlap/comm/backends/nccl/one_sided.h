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
#include "torch_overlap/comm/shutdown.h"
#include "torch_overlap/symm/cuda/device_wait_monitor.h"
#include "torch_overlap/symm/remote_access.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {

// A part of a put: `bytes` bytes that go to byte `offset` of the peer's tensor.
struct RemotePiece {
  const std::byte* from;
  size_t bytes;
  size_t offset;
  bool is_staged;  // first copied to memory that is registered with NCCL
};
using RemotePieces = c10::SmallVector<RemotePiece, 4>;
// Cuts a put into pieces. Data within [begin, begin + known) is one piece; other data has pieces of
// at most `staging` bytes.
TORCH_OVERLAP_API RemotePieces remote_pieces(const void* from, size_t bytes, size_t offset,
                                             const void* begin, size_t known, size_t staging);

// Puts and signals of one window to ranks whose memory is not mapped, by NCCL's one-sided calls
// (2.29). NCCL uses copy engines among GPUs of an NVLink domain, otherwise its proxy and the
// network.
//
//   put      from the window's own tensor: ncclPutSignal. From other memory: copied to the staging
//            memory, a piece at a time, and put from there.
//   signal   increments a count in the staging memory, and puts the count into the peer's signal
//            pad, where the kernel of wait_signal reads it like any other.
//
// NCCL's own signals are not used, because a communicator has one count per peer, which every put
// raises too; because a wait for it ends only with the signal; and because in a graph a put waits
// until the receiver has waited in the same graph for the preceding one.
//
// Order. ncclPutSignal has ended on its stream once the data, and NCCL's signal after it, are at
// the peer. The queue of puts and signals (backend.h) runs one operation after another, so the
// staging memory has one user at a time, and a count arrives after the data that was put before it.
//
// The native communicator is created for the window and not split off: a split requires a parent
// with nothing outstanding, and a wait for a signal may be.
//
// Threads: put() and signal() require the launch lock; the others are thread-safe.
class TORCH_OVERLAP_API OneSided final : public RemoteAccess,
                                         public std::enable_shared_from_this<OneSided> {
 public:
  // Returns the support for a group of `size` ranks with the loaded NCCL.
  static Backend::RemoteSupport support(const NcclApi& api, int size);
  explicit OneSided(const SymmetricMemory& memory);
  // Collective. Called once, before all functions but stop() and close(). `context` is that of the
  // native communicator, with its own name and store. Each step is bounded by the context's
  // timeout; an error of one rank is thrown on every rank.
  void open(const NcclApi& api, const BackendContext& context, Bootstrap& bootstrap,
            std::string_view op, SymmetricMemory& memory);

  // `has_launched` becomes true once a part of the operation is enqueued.
  void put(const void* from, size_t bytes, int dst, size_t offset, cudaStream_t stream,
           bool& has_launched);
  void signal(int dst, const cuda::DeviceWaitMonitor& monitor, cudaStream_t stream,
              bool& has_launched);

  // Ends running operations without the other ranks. A communicator that is being created ends once
  // NCCL has created it, or its timeout has passed.
  void stop();
  void close(std::chrono::milliseconds limit) override;

 private:
  void require_running();
  void set_handle(std::shared_ptr<NcclHandle> handle);
  std::shared_ptr<NcclHandle> get_handle();
  void allocate();
  // Location of a tensor in its allocation.
  struct TensorLocation {
    size_t offset = 0;
    size_t allocation_bytes = 0;
  };
  TensorLocation place() const;
  void exchange_locations(Bootstrap& bootstrap, std::string_view op, const TensorLocation& mine);
  // Collective over the native communicator's ranks.
  void register_windows(const std::vector<int>& peers);
  ncclWindow_t add_window(void* data, size_t bytes);
  void put_from(const void* from, size_t bytes, int dst, ncclWindow_t window, size_t offset,
                cudaStream_t stream);
  std::byte* staging() const { return static_cast<std::byte*>(staging_->mutable_data_ptr()); }
  uint64_t* count_for(int dst) const;
  size_t counts_bytes() const;

  const c10::Device device_;
  const int rank_;
  const int size_;
  void* const data_;  // null if the tensor has no bytes
  const size_t bytes_;
  void* const pad_;
  std::vector<size_t> offsets_;  // offset in bytes of each rank's tensor in its allocation
  size_t allocation_bytes_ = 0;
  size_t staging_bytes_ = 0;  // these follow the counts
  LeakedAtExit<at::Tensor> staging_;
  std::mutex stop_mutex_;
  bool is_stopped_ = false;
  std::shared_ptr<NcclHandle> handle_;  // set once, under stop_mutex_, before any operation
  ncclWindow_t data_window_ = nullptr;
  ncclWindow_t pad_window_ = nullptr;
};

}  // namespace torch_overlap
