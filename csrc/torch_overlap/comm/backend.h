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

// Inputs of a backend's factory. `store` is exclusive to this communicator: no other communicator,
// and no earlier one of the same name, has written a key into it.
struct BackendContext {
  std::string name;
  int rank = 0;
  int size = 1;
  c10::Device device{c10::kCPU};
  c10::intrusive_ptr<c10d::Store> store;
  // The store that the caller passed. It is kept alive because it may contain the server of
  // `store`.
  c10::intrusive_ptr<c10d::Store> user_store;
  ResolvedOptions options;
  // Current timeout, which TorchComm::set_timeout() changes. `options` has the initial one.
  std::shared_ptr<const std::atomic<Milliseconds>> current_timeout;
  Milliseconds timeout() const {
    return current_timeout ? current_timeout->load() : options.timeout;
  }
  // Runs the communicator's abort hooks, for abort_process() (process_abort.h). Never throws.
  std::function<void()> on_abort;
  // The flight recorder's entry of the communicator. A backend reports its failure to it
  // (recorder_dump.h). Null if the backend was made without a TorchComm.
  std::shared_ptr<CommRecord> record;
};

// The part of a split that this rank belongs to. All members of one part pass the same color, and
// their position in the list as child.rank. A rank in no part passes member = false.
struct SplitRequest {
  bool member = false;
  int color = 0;
  BackendContext child;
};

// The members of a communicator's next generation, after their rendezvous. See
// TorchComm::reconfigure.
struct RegroupRequest {
  // options.timeout is the remaining time.
  BackendContext context;
  // Rank in this backend's generation, indexed by new rank. Empty if any member was not in that
  // generation.
  std::vector<int> old_ranks;
};

// Interface of a communication backend: order, streams, events, lifetime and timeouts of
// operations. Primitives defines what an operation does.
//
// Threads: issue() may be called from any thread; an internal lock orders the calls. The owner
// (TorchComm) calls the other functions, one at a time.
class TORCH_OVERLAP_API Backend : public std::enable_shared_from_this<Backend> {
 public:
  virtual ~Backend() = default;

  // Version of the underlying library, e.g. "2.28.9".
  virtual std::string version() const = 0;

  // Issues one validated operation. Throws if it cannot be issued. If nothing was sent, the
  // communicator stays usable. After an error half way this rank is out of step with its peers:
  // failure() then has the error, and no further operation is issued. Throws the pending error if
  // an earlier operation failed.
  virtual WorkPtr issue(Call call) = 0;

  // Collective over all ranks. Returns null on a rank that is not a member.
  virtual std::shared_ptr<Backend> split(const SplitRequest& request) = 0;

  // Waits for all operations, at most for the communicator's timeout, then frees everything. Throws
  // if an operation failed or did not end. Called once.
  virtual void finalize() = 0;
  // Ends all operations on this rank at once, without contacting other ranks. Never ends the
  // process. May be called from any thread, also while another thread is inside issue().
  virtual void abort() = 0;
  // Same as abort(), but slow steps continue in the background, for callers with a deadline.
  // `notify_peers` is false after a timeout: the peers' own timeouts are about to expire, and their
  // errors then name the rank that is really missing.
  virtual void abort_async(bool notify_peers) { abort(); }
  virtual bool is_aborted() const = 0;
  // Returns why no operation can be issued any more: abort(), or an operation that failed. Empty if
  // operations can be issued.
  virtual std::string failure() { return is_aborted() ? "it was aborted, or failed" : ""; }

  // Returns that `rank` has left, and why. Empty if it has not left, or if the backend is not
  // notified of departures.
  virtual std::string departure_reason(int rank) { return {}; }

  // Returns the backend of the next generation. Ends all pending operations with an error, calls
  // `rendezvous`, which waits for the new members, and creates their connections. Collective over
  // the new members: each calls it on its previous backend, which may be an aborted one. Afterwards
  // the owner drops this backend; if this throws, the owner gives the backend up. Throws
  // kUnsupported if the backend cannot change its members. `timeout` covers all of that; the part
  // that ends the old operations must leave some of it (abort_within()).
  virtual std::shared_ptr<Backend> regroup(const std::function<RegroupRequest()>& rendezvous,
                                           Milliseconds timeout);

  // True if issue() supports sends and receives with tags, and receives from any rank.
  virtual bool has_tags() const { return false; }

  // True if its communicators have windows: issue() then supports put, signal and wait_signal.
  virtual bool has_windows() const { return false; }
  // Called before a tensor is registered. Creates what the operations on windows need, so that none
  // of them has to wait for the device.
  virtual void prepare_windows() {}

  // Called when all ranks create a window, at the same position among their operations. It does not
  // matter whether the creation succeeds.
  virtual void begin_window() {}
  // Adds the memory of a window, which all ranks can reach from now until remove_window(). `number`
  // is equal on all ranks.
  virtual void add_window(uint64_t number, const std::shared_ptr<SymmetricMemory>& memory) {}
  // Removes the memory of a window. After it returns, no operation accesses the memory or begins
  // to. Throws kTimeout.
  virtual void remove_window(const SymmetricMemory& memory, Milliseconds timeout) {}

  // Support of windows for ranks whose memory cannot be mapped. `why` is the reason for the error
  // if there is no support, and may be empty.
  struct RemoteSupport {
    bool can = false;
    std::string why{};
  };
  virtual RemoteSupport remote_access_support() const { return {}; }
  // Opens the access to ranks whose memory cannot be mapped, for a memory of which only some parts
  // are mapped. Collective over all ranks, whose remote_access_support() must all be true. The wait
  // is bounded by a timeout; an error of one rank is thrown on every rank.
  virtual std::shared_ptr<RemoteAccess> open_remote(Bootstrap& bootstrap, std::string_view op,
                                                    SymmetricMemory& memory);

  // True if issue() supports calls with a `norm`.
  virtual bool has_rms_norm() const { return false; }
  // True if the norm of such a call may have a quantization, for rows of `row_bytes` bytes.
  virtual bool quantizes_rms_norm(at::ScalarType dtype, size_t row_bytes) const { return false; }
  // Returns the state of the kernel that sums and normalizes in such a call. Equal on all ranks.
  virtual NormKernel rms_norm_kernel(const Call& call) const { return NormKernel::none; }
  // Applies the norm of such a call to its `tensor`, which is already summed. Local; runs on the
  // current stream.
  virtual void run_rms_norm(const Call& call);

  // Prepares memory that many operations will use, for libraries that benefit from registration.
  // Local. TorchComm ensures that each range is registered once, and deregistered.
  virtual void register_memory(const at::Tensor& tensor) {}
  virtual void deregister_memory(const at::Tensor& tensor) {}

  // The raw communicator of the underlying library as a number (ncclComm_t); 0 if there is none.
  virtual int64_t native_handle() const { return 0; }

 protected:
  // Calls abort() on a separate thread. Rethrows here what it throws within `limit`. An abort that
  // takes longer continues in the background, with a warning.
  void abort_within(Milliseconds limit);
};

using BackendFactory = std::function<std::shared_ptr<Backend>(const BackendContext&)>;

struct BackendEntry {
  BackendFactory make;
  // Supported device types, e.g. {kCPU, kCUDA}.
  std::vector<c10::DeviceType> devices;
  // False if the backend does not communicate: creating or splitting a communicator is then not
  // collective.
  bool has_peers = true;
  // Checks the hints of an existing communicator. Emits one warning that names the hints that the
  // backend does not know, and throws on a value that cannot be parsed. Null if it accepts any
  // hints.
  std::function<void(const Hints&)> check_hints = nullptr;
};

// The registry of backends. Names are lower case. Registering a name twice replaces the entry.
TORCH_OVERLAP_API void register_backend(const std::string& name, BackendEntry entry);
// Returns a copy, because another thread may replace the entry.
TORCH_OVERLAP_API std::optional<BackendEntry> find_backend(const std::string& name);
TORCH_OVERLAP_API std::vector<std::string> registered_backends();

// Registers a backend at namespace scope, in its register.cpp.
struct TORCH_OVERLAP_API BackendRegistration {
  BackendRegistration(const std::string& name, BackendEntry entry) {
    register_backend(name, std::move(entry));
  }
};

}  // namespace torch_overlap
