#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <nccl.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "torch_overlap/comm/backend.h"
#include "torch_overlap/comm/backends/nccl/api.h"
#include "torch_overlap/comm/backends/nccl/config.h"

namespace torch_overlap {

// run_with_timeout() for CUDA calls, which may run while another thread captures. `work` runs on a
// thread of its own, and selects the device by cuda::use_device().
bool run_bounded_on_cuda(std::function<void()> work, std::chrono::milliseconds limit);

// The owner of one ncclComm_t. Shared by the backend and by every graph that captured the
// communicator: the last of them frees it.
//
// Blocking. NCCL's non-blocking communicators start a thread for every launch (group.cc), which
// costs more than the launch, and would capture from a thread that does not own the capture. This
// communicator is therefore blocking, and calls that can hang are bounded from outside: creation,
// split and free run on a thread of their own, which is waited for with a limit; a hang inside a
// launch is detected by the watchdog and ended by stop().
//
// Freeing and stopping. ncclCommAbort raises flags that make kernels and host threads return, waits
// until no graph holds the communicator any more, and frees it. Until then the flags stay raised:
// every replay that is queued or launched later ends at once. ncclCommAbort is never called while a
// thread may be inside NCCL with the communicator (mutex() is held around every use): for such a
// thread stop() first calls ncclCommRevoke, which raises the same flags, lowers them again, and
// frees nothing.
//
// Threads: comm() requires mutex(); everything else is thread-safe.
class NcclHandle : public std::enable_shared_from_this<NcclHandle> {
 public:
  // Limit for NCCL to free memory, or to return from a call once the abort flags are raised.
  static constexpr std::chrono::seconds kNcclExitTimeout{10};

  // Collective. Throws kTimeout if not all ranks arrive within the communicator's timeout; the
  // error comes up to kNcclExitTimeout later. `op` is the prefix of error messages.
  static std::shared_ptr<NcclHandle> create(const NcclApi& api, const BackendContext& context,
                                            const std::string& op = "new_comm");
  // Collective over the parent's ranks, none of which may have operations outstanding. Returns null
  // on a rank that is not a member. If it throws, the parent is stopped: a rank may be stuck in it.
  std::shared_ptr<NcclHandle> split(const SplitRequest& request, Milliseconds timeout);
  // Collective over the ranks that stay, in their order; can_shrink() must be true on each. Ends
  // all operations, and creates the communicator of these ranks. `excluded` has the other ranks,
  // which need not be alive. This handle cannot be used afterwards: stop() it.
  std::shared_ptr<NcclHandle> shrink(const BackendContext& context, std::vector<int> excluded,
                                     Milliseconds timeout);
  bool can_shrink() const { return api_.comm_shrink != nullptr && comm() != nullptr && !stopping_; }
  // Frees on a thread of its own, and waits for it for at most kNcclExitTimeout.
  ~NcclHandle();
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  const NcclApi& api() const { return api_; }
  // Null once the communicator is freed, or about to be.
  ncclComm_t comm() const { return native_->gone ? nullptr : native_->comm; }
  // Held around every NCCL call with comm(). A communicator and the children that share its
  // resources (splitShare) have one lock, because NCCL does not let two threads launch on them
  // concurrently.
  std::timed_mutex& mutex() const { return *mutex_; }

  // Ends all operations. Waits for that at most `limit`; 0 only starts it. Later calls are no-ops.
  void stop(Milliseconds limit);
  // Finalizes and frees the communicator, whose operations are all done. Returns false if NCCL did
  // not finish within `limit`; it then continues in the background. A communicator that graphs hold
  // is left to them.
  bool close(Milliseconds limit);

  // Count the graphs that captured the communicator.
  void add_graph() { graphs_.fetch_add(1); }
  void remove_graph() { graphs_.fetch_sub(1); }
  bool has_graphs() const { return graphs_ != 0; }

 private:
  // State of a thread that creates or frees a communicator, whose owner may already be destroyed.
  struct Native {
    Native(const NcclApi& api, const std::string& name, const Hints& hints, c10::DeviceIndex device)
        : config(api, name, hints), device(device) {}
    NcclConfig config;
    const c10::DeviceIndex device;
    ncclComm_t comm = nullptr;
    ncclUniqueId id{};
    std::atomic<bool> revoked{false};
    std::atomic<bool> gone{false};  // freed, or about to be
  };

  NcclHandle(const NcclApi& api, std::shared_ptr<Native> native,
             std::shared_ptr<std::timed_mutex> mutex)
      : api_(api), native_(std::move(native)), mutex_(std::move(mutex)) {}
  void stop_now();
  static void free(const NcclApi& api, Native& native);

  const NcclApi& api_;
  const std::shared_ptr<Native> native_;
  const std::shared_ptr<std::timed_mutex> mutex_;
  std::atomic<int> graphs_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace torch_overlap
