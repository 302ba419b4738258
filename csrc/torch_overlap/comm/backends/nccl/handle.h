#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <nccl.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "torch_overlap/comm/backend.h"
#include "torch_overlap/comm/backends/nccl/api.h"
#include "torch_overlap/comm/backends/nccl/config.h"

namespace torch_overlap {

// The owner of one ncclComm_t. Shared by the backend and by every graph that captured the
// communicator: the last of them to go frees it.
//
// Blocking or not. NCCL's non-blocking communicators start a thread for every launch (group.cc),
// which costs more than the launch, and would capture from a thread that does not own the capture.
// So ours is blocking, and what can hang is bounded from outside: making, splitting and freeing run
// on a thread of their own that is waited for so long and no longer; a hang inside a launch is seen
// by the watchdog and ended by stop().
//
// Freeing or stopping. ncclCommAbort raises flags on which kernels and host threads come out, waits
// until no graph holds the communicator any more, and frees it. Until then the flags stay up: every
// replay that is queued or comes later ends at once. It is never called while a thread may be
// inside NCCL with the communicator (mutex() is held around every use): for such a thread stop()
// first calls ncclCommRevoke, which raises the same flags, takes them down again, and frees
// nothing.
//
// Threads: comm() under mutex(); everything else from any thread.
class NcclHandle : public std::enable_shared_from_this<NcclHandle> {
 public:
  // How long NCCL may take to let go: a thread that is inside after the abort flags are up, or
  // memory.
  static constexpr std::chrono::seconds kComeOut{10};

  // Collective. Throws kTimeout when not all ranks come within the communicator's timeout, and up
  // to kComeOut later. `op` is what errors begin with.
  static std::shared_ptr<NcclHandle> create(const NcclApi& api, const BackendContext& context,
                                            const std::string& op = "new_comm");
  // Collective over the parent's ranks, none of which may have operations outstanding. Null for a
  // rank that is not a member. After a throw the parent is stopped: a rank may be stuck in it.
  std::shared_ptr<NcclHandle> split(const SplitRequest& request, Milliseconds timeout);
  // Collective over the ranks that stay, in their order, each of which can_shrink(): ends all
  // operations, and makes their communicator. `excluded`: the ranks that do not stay, which need
  // not live. This one is of no use afterwards: stop() it.
  std::shared_ptr<NcclHandle> shrink(const BackendContext& child, std::vector<int> excluded,
                                     Milliseconds timeout);
  bool can_shrink() const { return api_.comm_shrink != nullptr && comm() != nullptr && !stopping_; }
  // Frees on a thread of its own, and waits for it for a few seconds at most.
  ~NcclHandle();
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  const NcclApi& api() const { return api_; }
  // Null once it is freed.
  ncclComm_t comm() const { return native_->gone ? nullptr : native_->comm; }
  // Held around every NCCL call with comm(). One lock for a communicator and the children that
  // share its resources (splitShare), which NCCL does not let two threads launch on at once.
  std::timed_mutex& mutex() const { return *mutex_; }

  // Ends all operations. Waits for that, at most `limit`; 0 only starts it. Once; later calls do
  // nothing.
  void stop(Milliseconds limit);
  // The orderly end, bounded: false if NCCL did not let go in time; then it goes on alone. All
  // operations are done. A communicator that graphs hold is left to them.
  bool close(Milliseconds limit);

  // Counts the graphs that captured it.
  void add_graph() { graphs_.fetch_add(1); }
  void remove_graph() { graphs_.fetch_sub(1); }
  bool has_graphs() const { return graphs_ != 0; }

 private:
  // What a thread needs that makes or frees a communicator while its owner may be gone.
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
