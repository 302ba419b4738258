#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/call.h"
#include "torch_overlap/comm/options.h"
#include "torch_overlap/comm/work.h"

namespace torch_overlap {

class Bootstrap;
class RemoteAccess;
struct CommRecord;

// What a backend needs to start. `store` is this communicator's alone: no other communicator, and
// no earlier one of the same name, has written a key into it.
struct BackendContext {
  std::string name;
  int rank = 0;
  int size = 1;
  c10::Device device{c10::kCPU};
  c10::intrusive_ptr<c10d::Store> store;
  // What the caller gave: kept, because the server behind `store` may live in it.
  c10::intrusive_ptr<c10d::Store> given_store;
  ResolvedOptions options;
  // The timeout now: TorchComm::set_timeout() changes it. `options` has the one to start with.
  std::shared_ptr<const std::atomic<Milliseconds>> live_timeout;
  Milliseconds timeout() const { return live_timeout ? live_timeout->load() : options.timeout; }
  // Runs the communicator's abort hooks, for end_process() (process_end.h); never throws.
  std::function<void()> on_abort;
  // What the flight recorder knows of the communicator: a backend tells it of its failure
  // (recorder_dump.h). Null where a backend is made without a TorchComm.
  std::shared_ptr<CommRecord> record;
};

// Which part of a split this rank is in. All members of one part pass the same color and their
// position in the list as child.rank; a rank in no part passes member = false.
struct SplitRequest {
  bool member = false;
  int color = 0;
  BackendContext child;
};

// The members of a communicator's next generation, which have met: see TorchComm::reconfigure.
struct RegroupRequest {
  // options.timeout is what is left of the time.
  BackendContext context;
  // By new rank: the rank in the generation that this backend was. Empty if there are members that
  // were not in it.
  std::vector<int> old_ranks;
};

// The contract of a communication backend: order, streams, events, lifetime and timeouts of
// operations. What an operation does is in its Primitives.
//
// Threads: launch() may be called from any thread; calls are ordered by a lock inside. The other
// functions are called by the owner (TorchComm), one at a time.
class TORCH_OVERLAP_API Backend : public std::enable_shared_from_this<Backend> {
 public:
  virtual ~Backend() = default;

  // The library underneath, e.g. "2.28.9".
  virtual std::string version() const = 0;

  // Issues one validated operation. Throws if it cannot be issued; in that case nothing was sent,
  // and the communicator stays usable. Throws the pending error if an earlier operation failed.
  virtual WorkPtr launch(Call call) = 0;

  // Collective over all ranks. Null for a rank that is not a member.
  virtual std::shared_ptr<Backend> split(const SplitRequest& request) = 0;

  // Waits until all operations are done, at most the communicator's timeout, then frees everything.
  // Throws if an operation failed or did not end. Called once.
  virtual void finalize() = 0;
  // Ends all operations at once, on this rank, without asking others. Never ends the process. May
  // be called from any thread, also while another is inside launch().
  virtual void abort() = 0;
  // The same, but what takes long goes on in the background: for who has a deadline. After a
  // timeout peers are not told: their own clocks are about to end, and then they name the rank that
  // is really missing.
  virtual void give_up(bool tells_peers) { abort(); }
  virtual bool is_aborted() const = 0;
  // Why nothing can be issued any more: abort(), or an operation that failed. Empty while it can.
  virtual std::string failure() { return is_aborted() ? "it was aborted, or failed" : ""; }

  // Why nothing more will come from a rank: that it has left, and why. Empty while it is there, and
  // where the backend is not told of it.
  virtual std::string why_left(int rank) { return {}; }

  // The backend of the next generation. Ends everything that is under way with an error, calls
  // `meet`, which waits for the new members, and makes what they talk over; collective over them,
  // each of which calls it on the backend that it had, also an aborted one. The owner drops this
  // backend afterwards, and gives it up if this throws. kUnsupported where it cannot be done.
  // `timeout` is for all of that: what ends the old operations leaves some of it (abort_within()).
  virtual std::shared_ptr<Backend> regroup(const std::function<RegroupRequest()>& meet,
                                           Milliseconds timeout);

  // True if launch() takes sends and receives with tags, and receives from any rank.
  virtual bool has_tags() const { return false; }

  // Whether its communicators have windows: launch() then takes put, signal and wait_signal.
  virtual bool has_windows() const { return false; }
  // Before a tensor is registered: makes what the operations on windows need, so that none of them
  // has to wait for the device.
  virtual void prepare_windows() {}

  // All ranks have come to make a window, at the same place among their operations, whatever comes
  // of it.
  virtual void begin_window() {}
  // A window's memory, which all ranks can reach, from now until remove_window(): the number is the
  // same on all of them.
  virtual void add_window(uint64_t number, const std::shared_ptr<SymmetricMemory>& memory) {}
  // No operation touches the memory when it returns, nor begins to. Throws kTimeout.
  virtual void remove_window(const SymmetricMemory& memory, Milliseconds timeout) {}

  // Whether windows have a way to ranks whose memory cannot be mapped. `why`, where they have none,
  // is for the error, and may be empty.
  struct RemoteSupport {
    bool can = false;
    std::string why{};
  };
  virtual RemoteSupport remote_support() const { return {}; }
  // Collective over all ranks, each of which said that it can: that way, for a partial memory.
  // Bounded; an error of one rank is thrown on every rank.
  virtual std::shared_ptr<RemoteAccess> open_remote(Bootstrap& bootstrap, std::string_view op,
                                                    SymmetricMemory& memory);

  // Whether launch() takes calls with a `norm`.
  virtual bool has_rms_norm() const { return false; }
  // Local, on the current stream: the norm of a `tensor` that is summed already, of such a call.
  virtual void run_rms_norm(const Call& call);

  // Local. The tensor's memory will be in many operations: a library that gains from knowing
  // prepares it. TorchComm sees to it that a range is registered once, and deregistered.
  virtual void register_memory(const at::Tensor& tensor) {}
  virtual void deregister_memory(const at::Tensor& tensor) {}

  // The raw communicator of the library underneath as a number (ncclComm_t); 0 where there is none.
  virtual int64_t native_handle() const { return 0; }

 protected:
  // abort() on a thread of its own. What it throws within `limit` is thrown here; an abort that
  // takes longer goes on in the background, and a warning says so.
  void abort_within(Milliseconds limit);
};

using BackendFactory = std::function<std::shared_ptr<Backend>(const BackendContext&)>;

struct BackendEntry {
  BackendFactory make;
  // Device types that it takes, e.g. {kCPU, kCUDA}.
  std::vector<c10::DeviceType> devices;
  // False: the backend talks to nobody, so making or splitting a communicator is not collective.
  bool has_peers = true;
  // Looks at the hints of a communicator that is there already: one warning names those that the
  // backend does not know, and a value that it cannot read throws. Null: it takes any.
  std::function<void(const Hints&)> check_hints = nullptr;
};

// The registry. Names are lower case. Registering a name twice replaces the entry.
TORCH_OVERLAP_API void register_backend(const std::string& name, BackendEntry entry);
// A copy, because another thread may replace the entry.
TORCH_OVERLAP_API std::optional<BackendEntry> find_backend(const std::string& name);
TORCH_OVERLAP_API std::vector<std::string> registered_backends();

// For use at namespace scope in a backend's register.cpp.
struct TORCH_OVERLAP_API BackendRegistration {
  BackendRegistration(const std::string& name, BackendEntry entry) {
    register_backend(name, std::move(entry));
  }
};

}  // namespace torch_overlap
