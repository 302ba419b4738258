#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/store_bootstrap.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {

// Access of a rank to another rank's part of a window: mapped memory (UNIFIED), or only put
// (SEPARATE).
enum class WinAccessType : uint8_t { WIN_ACCESS_TYPE_UNIFIED, WIN_ACCESS_TYPE_SEPARATE };

struct PutOptions : OpOptions {
  bool signal = false;  // a signal follows; the returned work is the signal's
};

// A window: a tensor on every rank that the other ranks write without its participation.
//
//   rank 0                                      rank 1
//   window->put(x, 1, 0, false)                 window->wait_signal(0, false)
//   window->signal(1, false)                    y = window->tensor().clone()      contains x
//
// Order. Puts and signals of one communicator to one rank take effect in the order of issue.
// Therefore, data put before a signal is visible after the wait that consumes the signal. A put by
// itself notifies nobody, unless it is asked to signal. A signal belongs to its window and its pair
// of ranks, and is consumed by one wait; an unconsumed signal is found by the next wait on that
// window, never by that of another window. A waiting rank blocks neither its peers nor the puts,
// signals or collectives that it issues meanwhile with async_op=true, which are not ordered with
// its waits nor with each other. async_op=false runs on the thread (CPU) or on the current stream
// (CUDA), in its order. On CUDA the waits of one communicator with async_op=true run in the order
// of issue.
//
// Nothing keeps a put from overwriting data that the owner still reads: the owner must signal back
// when it has read it.
//
// Reachability. Pairs of ranks that cannot map each other's memory are an error with the reason,
// unless the backend has another way to write to it (nccl: docs/explanation/windows.md). In that
// case only puts and signals reach it, and they cannot be captured in graphs.
//
// Timeouts. A wait whose signal does not arrive ends with a TimeoutError that names the window, the
// rank and the counts, and makes the communicator unusable, as does any operation that times out.
// On CUDA the operation itself ends, and the work enqueued after it on its stream runs; the next
// call or wait on the host throws the error.
//
// CUDA graphs. put, signal and wait_signal become nodes. Counts are kept in device memory, so that
// replays and eager calls can be mixed. The order above holds among eager calls and within one
// graph. Between a replay and anything else the order is that of the streams: call wait() on
// asynchronous works before a replay, and replay and call on one stream, or order the two by an
// event. Issue what a peer needs before the wait for its signal, and keep
// CUDA_DEVICE_MAX_CONNECTIONS above 1. The graph keeps the memory of the window alive, but does not
// count as work in flight for tensor_deregister(): let replays end before that.
//
// Lifetime. TorchComm::new_window makes the window, which keeps the communicator alive.
// reconfigure() ends registrations: the new members register again. The memory of other ranks stays
// mapped until tensor_deregister(), or until the window and all tensors of map_remote_tensor() are
// destroyed. A rank that exits without deregistering leaves its memory to those that still map it.
//
// Collectives of the communicator on tensors in the window may read and write the peers' tensors in
// place (docs/design/kernels.md). After such a collective has failed, other ranks may still access
// the tensor until their communicator has ended too: the tensor is kept alive until then.
//
// Threads: any. Collective calls must be in the same order on all ranks, relative to other
// collective calls of windows of this communicator. Registration also has its position among the
// communicator's collectives: it must not run concurrently with those of another thread.
class TORCH_OVERLAP_API TorchCommWindow : public std::enable_shared_from_this<TorchCommWindow> {
 public:
  using Tensor = at::Tensor;

  ~TorchCommWindow();
  TorchCommWindow(const TorchCommWindow&) = delete;
  TorchCommWindow& operator=(const TorchCommWindow&) = delete;

  // "<communicator>/window_<n>", by which operators find it (get_window below).
  const std::string& name() const { return name_; }
  const std::shared_ptr<TorchComm>& comm() const { return comm_; }

  // Registers `tensor`. Collective; blocks. `tensor` must be contiguous, of the same dtype and size
  // on all ranks, and in memory that other ranks can map: symmetric_empty(), or a
  // torch.cuda.MemPool over get_mem_allocator(). An error of one rank is an error on all ranks. If
  // `owning`, the window keeps the tensor alive; otherwise the caller does, and get_tensor() fails
  // once it is destroyed.
  void tensor_register(const Tensor& tensor, bool owning = true);
  // Deregisters the tensor. Collective; blocks. Waits for this window's operations, at most for the
  // communicator's timeout, then for all ranks, at most for twice that. Afterwards no rank writes
  // to the tensor, and the window can register another one. An error of one rank is an error on all
  // ranks, and the tensor stays registered. After finalize(), abort() or a failure of the
  // communicator it contacts no rank.
  void tensor_deregister();

  // Copies `tensor`, of the window's dtype, to elements [offset, offset + numel) of rank
  // `dst_rank`'s tensor. The work is done when the source may be overwritten.
  WorkPtr put(const Tensor& tensor, int dst_rank, int64_t offset, bool async_op,
              const PutOptions& options = {});
  // Increments the number of signals that `dst_rank` has from this rank.
  WorkPtr signal(int dst_rank, bool async_op, const OpOptions& options = {});
  // Waits for a signal from `peer_rank` that no wait has consumed, and consumes it.
  WorkPtr wait_signal(int peer_rank, bool async_op, const OpOptions& options = {});

  // Returns the tensor of `rank`, mapped into this process; it keeps that memory alive. Only
  // signals order reads and writes through it.
  Tensor map_remote_tensor(int rank) const;
  WinAccessType access_type(int peer_rank) const;
  // The registered tensor.
  Tensor tensor() const;
  bool has_tensor() const;
  // Number of bytes of one rank's part.
  int64_t bytes() const;
  at::ScalarType dtype() const;
  std::vector<int64_t> sizes() const;
  c10::Device device() const { return comm_->device(); }

 private:
  friend class TorchComm;
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  // The registration, in one value so that a call sees all of it or nothing.
  struct Registration {
    std::shared_ptr<const Membership> members;  // members of the communicator at registration
    std::shared_ptr<SymmetricMemory> memory;
    std::unique_ptr<StoreBootstrap> bootstrap;  // null for a backend without peers
    uint64_t number = 0;                        // number of the members' registration
    Tensor owned;                               // undefined if the caller owns it
    std::optional<WeakTensor> tensor;           // always set
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
    int64_t numel;
  };
  using RegistrationPtr = std::shared_ptr<const Registration>;

  TorchCommWindow(std::shared_ptr<TorchComm> comm, std::string name)
      : comm_(std::move(comm)), name_(std::move(name)) {}

  void register_with(const std::shared_ptr<const Membership>& members, const Tensor& tensor,
                     bool owning, const Fault& fault);
  RegistrationPtr require(std::string_view op) const;
  // Returns the checker of the members that registered, which must be the present ones.
  Checker checker(const Registration& registered, std::string_view op) const;
  static Call one_sided(OpName name, Primitive primitive, const Registration& registered, int rank);
  // Throws in a capture if the operation targets a rank whose memory is not mapped.
  void check_remote_not_capturing(const Registration& registered, std::string_view op,
                                  int rank) const;
  WorkPtr issue(const Checker& check, Call call, bool async_op, const OpOptions& options);
  // Waits until all issued operations have ended.
  void drain(Milliseconds timeout);
  void wait_for(TorchWork& work, std::chrono::steady_clock::time_point deadline,
                Milliseconds timeout) const;

  const std::shared_ptr<TorchComm> comm_;
  const std::string name_;
  mutable std::mutex mutex_;
  RegistrationPtr registration_;
  std::deque<WorkPtr> in_flight_;
  int num_issuing_ = 0;                   // calls between their check and in_flight_
  std::condition_variable issuing_done_;  // num_issuing_ is 0
};

// Returns the live window of that name that this rank made. Throws kValue with a list of the
// existing names. For ranks that are threads it behaves as get_comm (comm/registry.h).
TORCH_OVERLAP_API std::shared_ptr<TorchCommWindow> get_window(const std::string& name);
TORCH_OVERLAP_API std::vector<std::string> window_names();

namespace detail {
void add_window(const std::shared_ptr<TorchCommWindow>& window);
void remove_window(const TorchCommWindow* window);
}  // namespace detail

}  // namespace torch_overlap
