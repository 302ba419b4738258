#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/gemm/checked_gemm.h"
#include "torch_overlap/overlap/device.h"
#include "torch_overlap/symm/bootstrap.h"

namespace torch_overlap {

// The participants of overlapped operations: the ranks of a communicator, or those of another
// framework that provides two callbacks.
class TORCH_OVERLAP_API OverlapGroup {
 public:
  // Creates the group of a communicator's ranks, on its device.
  static std::shared_ptr<OverlapGroup> of(const std::shared_ptr<TorchComm>& comm);
  // `all_gather` returns every rank's bytes, by rank; `barrier` returns after all ranks have called
  // it. Both are called on the thread that creates a channel. Data can then move only through
  // memory that the ranks share.
  struct Callbacks {
    std::function<std::vector<std::string>(const std::string&)> all_gather;
    std::function<void()> barrier;
  };
  static std::shared_ptr<OverlapGroup> of(Callbacks callbacks, int rank, int size,
                                          c10::Device device, std::string name,
                                          std::chrono::milliseconds timeout);

  int rank() const { return rank_; }
  int size() const { return size_; }
  c10::Device device() const { return device_; }
  const std::string& name() const { return name_; }
  std::chrono::milliseconds timeout() const;
  // Null for another framework's group, and after the communicator was destroyed: a group does not
  // keep it alive.
  std::shared_ptr<TorchComm> comm() const { return comm_.lock(); }
  // Returns a bootstrap for one setup; `what` is its unique name in the group. Null if there are no
  // peers. Throws if the communicator was destroyed.
  std::unique_ptr<Bootstrap> bootstrap(std::string_view op, const std::string& what) const;
  // Returns every rank's text, by rank. Collective, on the host. Returns only `mine` if there are
  // no peers. Throws if the communicator was destroyed.
  std::vector<std::string> exchange(std::string_view op, const std::string& what,
                                    const std::string& mine) const;
  // Throws unless operations can begin: not finalized, not aborted, and the same members.
  void require_active(std::string_view op) const;
  // Returns Backend::departure_reason().
  std::string departure_reason(int rank) const;

 private:
  OverlapGroup() = default;
  // Returns the communicator. Throws if it was destroyed.
  std::shared_ptr<TorchComm> require_comm(std::string_view op) const;
  std::weak_ptr<TorchComm> comm_;
  bool is_outside_ = false;
  uint64_t generation_ = 0;
  Callbacks callbacks_;
  int rank_ = 0;
  int size_ = 1;
  c10::Device device_{c10::kCPU};
  std::string name_;
  std::chrono::milliseconds timeout_{0};
};

class OverlapChannel;

// Options of one operation.
struct OperationOptions {
  // Payload that all ranks must agree on at entry: the operation starts after all ranks have
  // entered it, and a mismatch fails on both ranks. Empty: a kernel of the operation does the entry
  // itself.
  std::optional<EntryPayload> entry;
  OverlapChannel* lender = nullptr;  // channel whose streams are used; null: the channel's own
  bool single_stream = false;        // see OverlapStreams::fork()
  // Runs begin() on the communication stream. Other streams are ordered after it only from their
  // first exchange(), wait_for_flags(), post() or order_after_begin() on. For operations of which
  // no other rank sees anything before a GEMM is done: begin() may run late while that GEMM
  // occupies all SMs. If false, or if the transport does not support it, all streams are ordered
  // after begin().
  bool begin_on_comm_stream = false;
  // See OverlapDevice::acquire_resident_kernel_lock().
  bool fills_device = false;
};

// State that the ranks of a group share for overlapped operations: on each rank a piece of memory
// that the others write to, streams to run work on, and a transport. Operations run one at a time,
// in the order of the calls, which must be the same on all ranks. Each is ordered after the
// previous one even if the caller's stream is another. Any other access to the data must be
// declared by a Use. In CUDA graphs the order between a replay and anything else is that of the
// streams.
//
// Lifetime: create() is collective. Destruction is not: it frees this rank's memory after no other
// rank has it mapped. Thread-safe: a lock serializes operations.
class TORCH_OVERLAP_API OverlapChannel final : public CommAttachment {
 public:
  struct Request {
    std::string_view op;  // for errors
    std::string name;
    std::string digest;  // must be equal on all ranks
    int64_t bytes = 0;
    int flags = 0;
    int tiles = 0;
    StreamOptions streams{};
    bool use_ce = false;
    int blocks = 16;
    int cluster = 1;
    // Reason why this rank cannot create a channel. If any rank has one, all ranks throw.
    Fault fault{};
  };
  // Collective. If some pair of ranks cannot map each other's memory, data goes through the
  // communicator; without a communicator that is an error.
  static std::shared_ptr<OverlapChannel> create(std::shared_ptr<OverlapGroup> group,
                                                const Request& request);
  // Returns a channel that moves data through the communicator and has no data itself: the caller
  // passes the memory. Local, and possible during a capture.
  static std::shared_ptr<OverlapChannel> over_communicator(std::string_view op,
                                                           const std::shared_ptr<TorchComm>& comm,
                                                           const StreamOptions& streams);

  const OverlapGroup& group() const { return *group_; }
  int64_t bytes() const { return layout_.bytes; }
  int flags() const { return layout_.flags; }
  // Returns a tensor in this rank's data.
  at::Tensor data(int64_t at, c10::IntArrayRef sizes, at::ScalarType dtype) const;
  // Returns the offset in bytes of `tensor` in the data; 0 if the ranks do not map it.
  int64_t offset_of(const at::Tensor& tensor) const;
  OverlapDevice& device() const { return *device_; }
  const Transport& transport() const { return *transport_; }
  // Reason why ranks cannot map each other's memory; empty if they can.
  const std::string& unsupported_reason() const { return unsupported_reason_; }
  // Returns SymmetricMemory::shares_devices().
  bool shares_devices() const;
  // True if the caller's stream is being captured: streams are then branches of a graph and cost
  // nothing.
  bool is_captured() const;

  // Guards reads and writes of the data outside of an operation. While it lives, these are ordered
  // after the previous operation and before the next, even on other streams. Operations may be
  // nested in it, on the same stream.
  class TORCH_OVERLAP_API Use {
   public:
    explicit Use(OverlapChannel& channel);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    OverlapChannel& channel_;
    std::unique_lock<std::recursive_mutex> lock_;
  };

  // While the lock is held, no other thread begins an operation.
  std::unique_lock<std::recursive_mutex> lock() const { return std::unique_lock(mutex_); }

  // True if an operation failed half way: no further operation is accepted.
  bool is_broken() const;
  // Returns how often a channel was created or broke in this process. Cached capabilities are valid
  // until it changes.
  static uint64_t changes();
  // Throws if a wait of an earlier operation has expired, including in a replay.
  void check() const;
  // Waits until the device has finished the issued work, for at most `timeout`.
  void drain(std::chrono::milliseconds timeout) noexcept override;

  class Operation;

  // One operation: between the fork from the caller's stream and the join, `body` enqueues work on
  // the streams of this channel, or on those of a lender.
  class TORCH_OVERLAP_API Session {
   public:
    Session(OverlapStreams& its_streams, Transport& its_transport,
            const OverlapChannel& its_channel)
        : streams(its_streams), transport(its_transport), channel(its_channel) {}
    OverlapStreams& streams;
    Transport& transport;
    const OverlapChannel& channel;

    // Orders the stream after begin(), for work that uses the transport directly. The functions
    // below do so where it is needed.
    void order_after_begin(int stream);
    void exchange(int stream, const Transport::Move& move);
    // Enqueues a GEMM on the stream. `product` must live until the streams are joined.
    void gemm(int stream, CheckedGemm& product);
    // Enqueues a sum on the stream.
    void sum(int stream, const SumArgs& args);
    void wait_for_flags(int stream, const std::vector<int>& flags);
    void post(int stream, int flag);

   private:
    friend class Operation;
    void begin(const EntryPayload& entry);
    OverlapStreams::Mark begin_mark_{};
    std::vector<bool> is_after_begin_;  // by stream; empty: all streams are
  };
  template <typename Body>
  void operate(std::string_view op, const Body& body, const OperationOptions& options = {});

  // An operation that stays in flight while the caller does other work, on other channels too:
  // finish() joins the streams. If it is destroyed without finish(), the channel can no longer be
  // used.
  class TORCH_OVERLAP_API Operation {
   public:
    // Throws what operate() throws.
    Operation(std::string_view op, OverlapChannel& channel, const OperationOptions& options = {});
    ~Operation();
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    // Calls body(session). If that throws, the operation fails.
    template <typename Body>
    void enqueue(const Body& body) {
      try {
        body(session_);
      } catch (...) {
        fail();
        throw;
      }
    }
    void finish();
    // Fails the operation with the exception that is being handled.
    void fail() noexcept;

   private:
    OverlapChannel& channel_;
    std::unique_lock<std::recursive_mutex> lock_;
    std::unique_lock<std::recursive_mutex> lender_lock_;
    Session session_;
    std::shared_ptr<void> resident_kernel_guard_;
    bool open_ = true;
  };

 private:
  OverlapChannel() = default;

  std::shared_ptr<OverlapGroup> group_;
  OverlapDevice* device_ = nullptr;
  ChannelLayout layout_;
  at::Tensor part_;  // bytes
  std::shared_ptr<SymmetricMemory> memory_;
  std::string unsupported_reason_;
  std::unique_ptr<OverlapStreams> streams_;
  std::unique_ptr<Transport> transport_;
  mutable std::recursive_mutex mutex_;
  int uses_ = 0;                   // number of live uses
  uint64_t retained_capture_ = 0;  // last capture whose graph keeps the memory alive
  bool logs_ = false;
  void keep_for_graph();
  // Called by operations and uses. Operations nested in a use are ordered by the use.
  void enter();
  void leave();
  // Orders later work after everything that was issued, also after an error.
  void end_quietly() noexcept;
  void set_broken(std::string why);
  void log_exchange(const Transport::Move& move) const;
  void log_gemm(int stream, const GemmArgs& args) const;
  void log_sum(int stream, const SumArgs& args) const;
  std::string broken_;  // error that ended an operation half way; empty: none
};

template <typename Body>
void OverlapChannel::operate(std::string_view op, const Body& body,
                             const OperationOptions& options) {
  Operation operation(op, *this, options);
  operation.enqueue(body);
  operation.finish();
}

}  // namespace torch_overlap
