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

// How a rank gets at another's part of a window: as memory of its own (UNIFIED), or only through
// put (SEPARATE).
enum class WinAccessType : uint8_t { WIN_ACCESS_TYPE_UNIFIED, WIN_ACCESS_TYPE_SEPARATE };

struct PutOptions : OpOptions {
  bool signal = false;  // a signal follows, and the work is the signal's
};

// A window: a tensor on every rank that the other ranks write to without its help.
//
//   rank 0                                      rank 1
//   window->put(x, 1, 0, false)                 window->wait_signal(0, false)
//   window->signal(1, false)                    y = window->tensor().clone()      x is there
//
// Order. Puts and signals of one communicator to one rank take effect in the order of issue; so
// what is put before a signal is there after the wait that consumes the signal. A put by itself
// tells nobody, unless it is asked to signal. A signal belongs to its window and its pair of ranks,
// and is consumed by one wait; what is left over is found by the next wait, never by that of
// another window. A rank that waits holds up nobody: not the puts, signals or collectives that it
// issues meanwhile with async_op=true, which are not ordered with its waits nor with each other.
// async_op=false runs on the thread (CPU) or on the current stream (CUDA), in its order. On CUDA
// the waits of one communicator with async_op=true run in the order of issue.
//
// Nothing keeps a put from overwriting what the owner still reads: the owner signals back when it
// has read.
//
// Reach. Pairs of ranks that cannot map each other's memory are an error that says why, unless the
// backend has another way to write to it (nccl: docs/windows.md); then only puts and signals reach
// it, and not those of graphs.
//
// Timeouts. A wait whose signal does not come ends with a TimeoutError that names the window, the
// rank and the counts, and breaks the communicator, as any operation that times out. On CUDA the
// operation itself ends, and what is behind it on its stream runs; the error comes from the next
// call or wait on the host.
//
// CUDA graphs. put, signal and wait_signal become nodes; counts are kept in device memory, so that
// replays and eager calls mix. The order above holds among eager calls and within one graph;
// between a replay and anything else it is that of the streams: wait() for asynchronous works
// before a replay, and replay and call on one stream, or order the two by an event. Issue what a
// peer needs before the wait for its signal, and keep CUDA_DEVICE_MAX_CONNECTIONS above 1. The
// graph keeps the memory of the window, but does not count as work in flight for
// tensor_deregister(): let replays end before.
//
// Life. TorchComm::new_window makes it; it keeps the communicator. reconfigure() ends what is
// registered: the new members register again. The memory of other ranks stays
// mapped until tensor_deregister(), or until the window and all tensors of map_remote_tensor() are
// gone; a rank that has gone without deregistering leaves its memory to those that still have it.
//
// Collectives of the communicator on tensors in the window may have the ranks read and write them
// where they are (docs/kernels.md). When such a one has failed other ranks may still do so until
// their communicator has ended too: the tensor is kept until then.
//
// Threads: any. Collective calls in the same order on all ranks, with other collective calls of
// windows of this communicator. Registering has its place among the communicator's collectives too:
// not beside those of another thread.
class TORCH_OVERLAP_API TorchCommWindow : public std::enable_shared_from_this<TorchCommWindow> {
 public:
  using Tensor = at::Tensor;

  ~TorchCommWindow();
  TorchCommWindow(const TorchCommWindow&) = delete;
  TorchCommWindow& operator=(const TorchCommWindow&) = delete;

  // "<communicator>/window_<n>": how operators find it (get_window below).
  const std::string& name() const { return name_; }
  const std::shared_ptr<TorchComm>& comm() const { return comm_; }

  // Collective; blocks. `tensor` is contiguous, of the same dtype and size on all ranks, and its
  // memory is such that others can map it: symmetric_empty(), or a torch.cuda.MemPool over
  // get_mem_allocator(). What is wrong on one rank is an error on all. `owning`: the window keeps
  // the tensor; else the caller does, and get_tensor() fails when it is gone.
  void tensor_register(const Tensor& tensor, bool owning = true);
  // Collective; blocks. Waits for this window's operations, for the communicator's timeout at most,
  // then as long again for all ranks: afterwards nobody writes to the tensor. The window can take
  // another one. What goes wrong on one rank is an error on all, and the tensor stays registered.
  // After finalize(), abort() or a failure of the communicator it asks nobody.
  void tensor_deregister();

  // Copies `tensor`, of the window's dtype, to elements [offset, offset + numel) of rank
  // `dst_rank`'s tensor. Done when the source may be written again.
  WorkPtr put(const Tensor& tensor, int dst_rank, int64_t offset, bool async_op,
              const PutOptions& options = {});
  // Adds one to the signals that `dst_rank` has of this rank.
  WorkPtr signal(int dst_rank, bool async_op, const OpOptions& options = {});
  // Waits for a signal of `peer_rank` that no wait has consumed, and consumes it.
  WorkPtr wait_signal(int peer_rank, bool async_op, const OpOptions& options = {});

  // The tensor of `rank` as one of this process, whose memory it keeps. Nothing orders what is read
  // or written through it, but signals.
  Tensor map_remote_tensor(int rank) const;
  WinAccessType access_type(int peer_rank) const;
  // The registered tensor.
  Tensor tensor() const;
  bool has_tensor() const;
  // Of one part.
  int64_t bytes() const;
  at::ScalarType dtype() const;
  std::vector<int64_t> sizes() const;
  c10::Device device() const { return comm_->device(); }

 private:
  friend class TorchComm;
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  // What is registered: one value, so that a call sees all of it or nothing.
  struct Registration {
    std::shared_ptr<const Membership> members;  // of the communicator then
    std::shared_ptr<SymmetricMemory> memory;
    std::unique_ptr<StoreBootstrap> bootstrap;  // null for a backend without peers
    uint64_t number = 0;                        // of the members' registrations
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
  // Of the members that registered, who must be the present ones.
  Checker checker(const Registration& registered, std::string_view op) const;
  static Call one_sided(OpName name, Primitive primitive, const Registration& registered, int rank);
  // Of what goes to a rank whose memory is not mapped.
  void refuse_remote_capture(const Registration& registered, std::string_view op, int rank) const;
  WorkPtr issue(const Checker& check, Call call, bool async_op, const OpOptions& options);
  // Waits until all that was issued has ended.
  void drain(Milliseconds timeout);
  void wait_for(TorchWork& work, std::chrono::steady_clock::time_point deadline,
                Milliseconds timeout) const;

  const std::shared_ptr<TorchComm> comm_;
  const std::string name_;
  mutable std::mutex mutex_;
  RegistrationPtr registration_;
  std::deque<WorkPtr> in_flight_;
  int issuing_ = 0;                 // calls between their check and in_flight_
  std::condition_variable issued_;  // issuing_ is 0
};

// The live window of that name that this rank made; a kValue error lists those that exist. As
// get_comm (comm/registry.h) for ranks that are threads.
TORCH_OVERLAP_API std::shared_ptr<TorchCommWindow> get_window(const std::string& name);
TORCH_OVERLAP_API std::vector<std::string> window_names();

namespace detail {
void add_window(const std::shared_ptr<TorchCommWindow>& window);
void remove_window(const TorchCommWindow* window);
}  // namespace detail

}  // namespace torch_overlap
