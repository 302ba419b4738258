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
#include "torch_overlap/gemm/checked.h"
#include "torch_overlap/overlap/device.h"
#include "torch_overlap/symm/bootstrap.h"

namespace torch_overlap {

// Who takes part in overlapped operations: the ranks of a communicator, or of an outside framework
// that lends two callbacks.
class TORCH_OVERLAP_API OverlapGroup {
 public:
  // Of the communicator's ranks, on its device.
  static std::shared_ptr<OverlapGroup> of(const std::shared_ptr<TorchComm>& comm);
  // `all_gather`: everybody's bytes, by rank; `barrier` returns when all have called it. Both are
  // called by the thread that makes a channel. Data then moves through memory that the ranks share
  // only.
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
  // Null for an outside framework's, and once it is gone: a group does not keep it.
  std::shared_ptr<TorchComm> comm() const { return comm_.lock(); }
  // For something that is set up now: `what` is its own name in the group.
  std::unique_ptr<Bootstrap> bootstrap(const std::string& what) const;
  // Everybody's text, by rank. Collective, on the host. Alone where there are no peers to ask.
  std::vector<std::string> exchange(const std::string& what, const std::string& mine) const;
  // Throws unless operations can begin: finalized, aborted, other members.
  void require_active(std::string_view op) const;
  // Backend::why_left().
  std::string why_left(int rank) const;
  // Whether ranks may use each other's memory. For tests: as if they could not.
  bool may_be_direct() const;

 private:
  OverlapGroup() = default;
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

// What is said of one operation.
struct OverlapCall {
  // What all ranks say alike, and wait until all have; where two differ, both are told. Empty: a
  // kernel of the operation does that.
  std::optional<Begin> begin;
  OverlapChannel* lender = nullptr;  // whose lanes are used; null: the channel's own
  bool as_one = false;               // see Lanes::fork()
  // It begins first on the lane of communication, and others come behind that where they first
  // exchange, wait or tell, or say so: for what no other rank sees before a product is there, since
  // the begin may come late beside one that has all SMs. Otherwise, and where the transport cannot,
  // all lanes come behind it.
  bool begins_beside = false;
  // See OverlapDevice::take_turn().
  bool fills_device = false;
};

// What the ranks of a group share for overlapped operations: on each rank a piece of memory that
// the others write to, lanes to work on, and a transport between. One operation at a time, in the
// order of the calls, which is the same on all ranks; each comes after the one before it also when
// the caller's stream is another; what else touches its data says so by a Use. In CUDA graphs the
// order between a replay and anything else is that of the streams.
//
// Life: create() makes it, collectively. Its end frees the own memory once no other rank has it
// mapped; nobody is asked. Threads: any; operations are ordered by a lock.
class TORCH_OVERLAP_API OverlapChannel final : public CommAttachment {
 public:
  struct Request {
    std::string_view op;  // for errors
    std::string name;
    std::string digest;  // must be equal on all ranks
    int64_t bytes = 0;
    int flags = 0;
    int tiles = 0;
    LaneOptions lanes{};
    bool use_ce = false;
    int blocks = 16;
    int cluster = 1;
    // Why this rank cannot: then no rank can, and all throw.
    Fault fault{};
  };
  // Collective. Where some pair of ranks cannot reach each other's memory, data goes through the
  // communicator; without one that is an error.
  static std::shared_ptr<OverlapChannel> create(std::shared_ptr<OverlapGroup> group,
                                                const Request& request);

  const OverlapGroup& group() const { return *group_; }
  int64_t bytes() const { return layout_.bytes; }
  int flags() const { return layout_.flags; }
  // A tensor in this rank's part.
  at::Tensor data(int64_t at, c10::IntArrayRef sizes, at::ScalarType dtype) const;
  // Where a tensor of the data begins, in bytes.
  int64_t offset_of(const at::Tensor& tensor) const;
  OverlapDevice& device() const { return *device_; }
  const Transport& transport() const { return *transport_; }
  // Why data does not move directly; empty where it does.
  const std::string& obstacle() const { return obstacle_; }
  // See SymmetricMemory.
  bool shares_devices() const;
  // Whether the caller's stream is in a capture: lanes are branches of a graph, and cost nothing.
  bool is_captured() const;

  // What reads or writes the data outside of an operation does so while this lives: it comes behind
  // the operation before, and the next one behind it, also on other streams. Operations may lie
  // within, on the same stream.
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

  // While it lives no other thread begins an operation.
  std::unique_lock<std::recursive_mutex> lock() const { return std::unique_lock(mutex_); }

  // Whether an operation ended half way: none is taken any more.
  bool is_broken() const;
  // How often in this process a channel was made, or broke: what one can do is known until then.
  static uint64_t changes();
  // Throws if a wait of an operation has expired since, in a replay too.
  void check() const;
  // Waits until the device is done with what was issued, at most so long.
  void drain(std::chrono::milliseconds timeout) noexcept override;

  class Operation;

  // One operation: between its fork from the caller's stream and its join `body` puts work on the
  // lanes, which are this channel's, or those of a lender.
  class TORCH_OVERLAP_API Session {
   public:
    Session(Lanes& its_lanes, Transport& its_transport, const OverlapChannel& its_channel)
        : lanes(its_lanes), transport(its_transport), channel(its_channel) {}
    Lanes& lanes;
    Transport& transport;
    const OverlapChannel& channel;

    // The lane comes behind the begin, for what uses the transport by itself; what follows here
    // does so where it must.
    void behind_begin(int lane);
    void exchange(int lane, const Transport::Move& move);
    // Puts a product on the lane. It lives until the lanes are joined.
    void gemm(int lane, CheckedGemm& product);
    // Puts a sum on the lane.
    void sum(int lane, const SumArgs& args);
    void arrived(int lane, const std::vector<int>& flags);
    void post(int lane, int flag);

   private:
    friend class Operation;
    void begin(const Begin& operation);
    Lanes::Mark begun_{};
    std::vector<bool> is_behind_;  // by lane; empty: all are
  };
  template <typename Body>
  void operate(std::string_view op, const Body& body, const OverlapCall& call = {});

  // One that goes on while the caller does other things, on other channels too: the lanes are
  // joined by finish(). Dropped without it, the channel is of no more use.
  class TORCH_OVERLAP_API Operation {
   public:
    // Throws as operate().
    Operation(std::string_view op, OverlapChannel& channel, const OverlapCall& call = {});
    ~Operation();
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    Session& session() { return session_; }
    // Calls body(session()); the operation fails where that throws.
    template <typename Body>
    void put(const Body& body) {
      try {
        body(session_);
      } catch (...) {
        fail();
        throw;
      }
    }
    void finish();
    // Of the exception being handled.
    void fail() noexcept;

   private:
    OverlapChannel& channel_;
    std::unique_lock<std::recursive_mutex> lock_;
    std::unique_lock<std::recursive_mutex> lender_lock_;
    Session session_;
    std::shared_ptr<void> turn_;
    bool open_ = true;
  };

 private:
  OverlapChannel() = default;

  std::shared_ptr<OverlapGroup> group_;
  OverlapDevice* device_ = nullptr;
  ChannelLayout layout_;
  at::Tensor part_;  // bytes
  std::shared_ptr<SymmetricMemory> memory_;
  std::string obstacle_;
  std::unique_ptr<Lanes> lanes_;
  std::unique_ptr<Transport> transport_;
  mutable std::recursive_mutex mutex_;
  int uses_ = 0;           // that live
  uint64_t kept_for_ = 0;  // the last capture whose graph keeps it
  bool logs_ = false;
  void keep_for_graph();
  // Of operations and uses; those within a use are ordered by that.
  void enter();
  void leave();
  // What comes after it is ordered behind all that was issued, also after an error.
  void end_quietly() noexcept;
  void set_broken(std::string why);
  void log_exchange(const Transport::Move& move) const;
  void log_gemm(int lane, const GemmArgs& args) const;
  void log_sum(int lane, const SumArgs& args) const;
  std::string broken_;  // what ended an operation half way; empty: nothing has
};

template <typename Body>
void OverlapChannel::operate(std::string_view op, const Body& body, const OverlapCall& call) {
  Operation operation(op, *this, call);
  operation.put(body);
  operation.finish();
}

}  // namespace torch_overlap
