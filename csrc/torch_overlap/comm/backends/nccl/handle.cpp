#include "torch_overlap/comm/backends/nccl/handle.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <cstring>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/bounded.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/thread_device.h"

namespace torch_overlap {
namespace {

constexpr const char* kUniqueIdKey = "nccl_unique_id";
// Time for which a launch that is not stuck may hold the lock while the communicator is stopped.
constexpr auto kStopGrace = std::chrono::milliseconds(500);
// Time that ncclCommAbort may take to raise its flags.
constexpr auto kAbortFlagsTimeout = std::chrono::milliseconds(100);

// Rank 0 creates the ID; the others read it from the store.
ncclUniqueId share_unique_id(const NcclApi& api, const BackendContext& context,
                             const std::string& op) {
  ncclUniqueId id{};
  if (context.rank == 0) {
    nccl_check(api, api.get_unique_id(&id), "ncclGetUniqueId");
    const auto* bytes = reinterpret_cast<const uint8_t*>(&id);
    context.store->set(kUniqueIdKey, std::vector<uint8_t>(bytes, bytes + sizeof(id)));
    return id;
  }
  std::vector<uint8_t> bytes;
  try {
    context.store->wait({kUniqueIdKey}, context.options.timeout);
    bytes = context.store->get(kUniqueIdKey);
  } catch (const std::exception& error) {
    fail(ErrorKind::kTimeout, op, ": expected NCCL's unique id from rank 0 of '", context.name,
         "' within ", context.options.timeout.count(), " ms, got: ", error.what());
  }
  TORCH_OVERLAP_CHECK(bytes.size() == sizeof(id), kRuntime, op, ": expected ", sizeof(id),
                      " bytes as NCCL's unique id, got ", bytes.size(),
                      "; do all ranks load the same NCCL?");
  std::memcpy(&id, bytes.data(), sizeof(id));
  return id;
}

[[noreturn]] void timed_out(std::string_view op, const std::string& name, Milliseconds timeout) {
  fail(ErrorKind::kTimeout, op, ": expected all ranks of '", name, "' in NCCL within ",
       timeout.count(),
       " ms, got none of its answers; look for the rank that did not come "
       "(NCCL_DEBUG=INFO shows each rank's progress)");
}

}  // namespace

bool run_bounded_on_cuda(std::function<void()> work, std::chrono::milliseconds limit) {
  return run_with_timeout(
      [work = std::move(work)] {
        const cuda::RelaxedCapture relaxed;
        work();
      },
      limit);
}

std::shared_ptr<NcclHandle> NcclHandle::create(const NcclApi& api, const BackendContext& context,
                                               const std::string& op) {
  auto native =
      std::make_shared<Native>(api, context.name, context.options.hints, context.device.index());
  native->id = share_unique_id(api, context, op);
  const auto make = [&api, native, op, rank = context.rank, size = context.size] {
    cuda::use_device(native->device);
    const ncclResult_t result =
        api.comm_init(&native->comm, size, native->id, rank, native->config.get());
    if (result == ncclInProgress) {
      (void)api.comm_abort(native->comm);
      fail(ErrorKind::kUnsupported, op,
           ": expected NCCL to make a blocking communicator, got a non-blocking one; unset "
           "NCCL_COMM_BLOCKING");
    }
    nccl_check(api, result, "ncclCommInitRankConfig");
  };
  if (!run_bounded_on_cuda(make, context.options.timeout)) {
    // Raises the abort flags, which make the other thread return. NCCL set the pointer before it
    // began to communicate; while it communicates, abort frees nothing that it needs.
    ncclComm_t comm = std::atomic_ref(native->comm).load();
    run_bounded_on_cuda([&api, native, comm] { (void)api.comm_abort(comm); }, kNcclExitTimeout);
    timed_out(op, context.name, context.options.timeout);
  }
  // NCCL returns when all ranks have joined, so all have read the ID.
  if (context.rank == 0) delete_keys(*context.store, {kUniqueIdKey});
  return std::shared_ptr<NcclHandle>(
      new NcclHandle(api, std::move(native), std::make_shared<std::timed_mutex>()));
}

std::shared_ptr<NcclHandle> NcclHandle::split(const SplitRequest& request, Milliseconds timeout) {
  auto child = std::make_shared<Native>(api_, request.child.name, request.child.options.hints,
                                        native_->device);
  const int color = request.member ? request.color : NCCL_SPLIT_NOCOLOR;
  const auto make = [self = shared_from_this(), child, color, key = request.child.rank] {
    cuda::use_device(child->device);
    const std::lock_guard lock(self->mutex());
    TORCH_OVERLAP_CHECK(self->comm() != nullptr, kState,
                        "split: expected a live communicator, got one that was aborted");
    const NcclApi& api = self->api();
    nccl_check(api, api.comm_split(self->comm(), color, key, &child->comm, child->config.get()),
               "ncclCommSplit");
  };
  try {
    if (!run_bounded_on_cuda(make, timeout)) timed_out("split", request.child.name, timeout);
  } catch (...) {
    stop(Milliseconds(0));
    throw;
  }
  if (!request.member) return nullptr;
  const bool shares = child->config.get()->splitShare == 1;
  return std::shared_ptr<NcclHandle>(new NcclHandle(
      api_, std::move(child), shares ? mutex_ : std::make_shared<std::timed_mutex>()));
}

void NcclHandle::free(const NcclApi& api, Native& native) {
  if (native.gone.exchange(true)) return;
  cuda::use_device(native.device);
  if (native.revoked) {
    nccl_check(api, api.comm_abort(native.comm), "ncclCommAbort");
    return;
  }
  const ncclResult_t result = api.comm_finalize(native.comm);
  if (result != ncclSuccess) {
    (void)api.comm_abort(native.comm);  // frees it too
    nccl_check(api, result, "ncclCommFinalize");
  }
  nccl_check(api, api.comm_destroy(native.comm), "ncclCommDestroy");
}

NcclHandle::~NcclHandle() {
  if (comm() == nullptr) return;
  run_bounded_on_cuda(
      [&api = api_, native = native_] {
        try {
          free(api, *native);
        } catch (const std::exception& error) {
          TORCH_WARN("NCCL communicator not freed: ", error.what());
        }
      },
      kNcclExitTimeout);
}

bool NcclHandle::close(Milliseconds limit) {
  return run_bounded_on_cuda(
      [self = shared_from_this()] {
        const std::lock_guard lock(self->mutex());
        // No further graph can capture it: the backend rejects new calls.
        if (self->comm() != nullptr && self->graphs_ == 0) free(self->api_, *self->native_);
      },
      limit);
}

void NcclHandle::stop(Milliseconds limit) {
  if (stopping_.exchange(true)) return;
  run_bounded_on_cuda(
      [self = shared_from_this()] {
        try {
          self->stop_now();
        } catch (const std::exception& error) {
          TORCH_WARN("NCCL communicator not aborted: ", error.what());
        }
      },
      limit);
}

void NcclHandle::stop_now() {
  const auto native = native_;
  if (comm() == nullptr) return;
  cuda::use_device(native->device);
  std::unique_lock lock(*mutex_, kStopGrace);
  if (comm() == nullptr) return;  // close() ran first
  if (!lock) {
    if (api_.comm_revoke != nullptr) {
      native->revoked = true;
      nccl_check(api_, api_.comm_revoke(native->comm, NCCL_REVOKE_DEFAULT), "ncclCommRevoke");
    }
    if (!lock.try_lock_for(kNcclExitTimeout)) {
      fail(ErrorKind::kRuntime,
           "a thread is stuck inside NCCL and does not come out; the "
           "communicator is left to it");
    }
  }
  if (native->gone.exchange(true)) return;
  lock.unlock();  // no other thread uses it any more
  const auto abort = [&api = api_, native] {
    cuda::use_device(native->device);
    nccl_check(api, api.comm_abort(native->comm), "ncclCommAbort");
  };
  if (graphs_ == 0) return abort();
  // Returns when the last graph is destroyed, so it is not waited for.
  run_bounded_on_cuda(abort, kAbortFlagsTimeout);
}

}  // namespace torch_overlap
