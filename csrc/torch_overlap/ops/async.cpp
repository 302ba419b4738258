#include "torch_overlap/ops/async.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"

namespace torch_overlap::ops {
namespace {

// The work that writes a result, and the version of the input that the result was computed from.
class PendingWork {
 public:
  PendingWork(std::string_view op, const at::Tensor& input, WorkPtr work)
      : op_(op), work_(std::move(work)), input_(input.unsafeGetTensorImpl()->version_counter()) {
    // Views of one buffer share a version counter, so a change of another part would be a false
    // alarm.
    const bool is_whole = input.nbytes() == input.storage().nbytes();
    is_checked_ = input_.enabled() && is_whole;
    if (is_checked_) version_ = input_.current_version();
  }

  void wait() {
    if (work_) work_->wait();
  }
  // Throws if the input was changed before the first wait. After that wait the caller owns the
  // input again, and threads that are still waiting must not mistake a later change for an earlier
  // one. Therefore the first check that passes sets `was_waited_for_`, which is read after the
  // version.
  void check_input() {
    const bool is_changed = is_checked_ && input_.current_version() != version_;
    TORCH_OVERLAP_CHECK(!is_changed || was_waited_for_, kState,
                        "wait_tensor: expected the input of ", op_,
                        "_async unchanged until its result is waited for, got one that was "
                        "changed in place. Call wait_tensor before the change, or pass a clone.");
    was_waited_for_ = true;
  }

  bool is_completed() const { return !work_ || work_->is_completed(); }
  // True if the result is complete and a wait for it has no error left to report.
  bool is_finished() const {
    try {
      return was_waited_for_ &&
             (!work_ || (work_->is_completed() && work_->status() == WorkStatus::COMPLETED));
    } catch (const std::exception&) {  // a work written in Python; its wait() reports the error
      return false;
    }
  }

 private:
  const std::string_view op_;  // has static storage duration
  const WorkPtr work_;         // null: nothing was sent
  const c10::VariableVersion input_;
  bool is_checked_ = false;
  uint32_t version_ = 0;
  std::atomic<bool> was_waited_for_ = false;
};
using PendingWorkPtr = std::shared_ptr<PendingWork>;

// The weak reference prevents reuse of the StorageImpl's address while the entry exists.
struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  PendingWorkPtr pending;
  ProcessStamp process{};
};

// Works are queried and destroyed outside the lock: either may need the GIL or take long.
class PendingWorks {
 public:
  void add(const at::Tensor& tensor, PendingWorkPtr pending) {
    const auto& storage = tensor.storage();
    Entry entry{.storage = storage.getWeakStorageImpl(), .pending = std::move(pending)};
    bool is_full = false;
    {
      const std::lock_guard lock(mutex_);
      std::swap(entries_[storage.unsafeGetStorageImpl()], entry);
      is_full = entries_.size() >= sweep_size_;
      // One thread sweeps. Its queries of works may re-enter this function.
      if (is_full) sweep_size_ = 2 * entries_.size();
    }
    if (is_full) sweep();
  }

  PendingWorkPtr find(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(tensor.storage().unsafeGetStorageImpl());
    return found == entries_.end() ? nullptr : found->second.pending;
  }

  // Removes the entry of a tensor that the caller still holds, unless another work writes it by
  // now.
  void erase(const at::Tensor& tensor, const PendingWorkPtr& pending) {
    erase(tensor.storage().unsafeGetStorageImpl(), pending);
  }

  int64_t size() {
    sweep();
    const std::lock_guard lock(mutex_);
    return static_cast<int64_t>(entries_.size());
  }

 private:
  void erase(c10::StorageImpl* storage, const PendingWorkPtr& pending) {
    Entry erased;
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(storage);
    if (found == entries_.end() || found->second.pending != pending) return;
    if (!found->second.process.is_current()) return;  // a wait for it is refused
    erased = std::move(found->second);
    entries_.erase(found);
  }

  // Removes entries that need no wait any more: the result is dead, or it is complete and was
  // waited for. A work that failed stays so that its wait() throws, and so does a work of the
  // parent of a fork.
  void sweep() {
    std::vector<std::pair<c10::StorageImpl*, Entry>> all;
    {
      const std::lock_guard lock(mutex_);
      all.assign(entries_.begin(), entries_.end());
    }
    for (const auto& [storage, entry] : all) {
      if (entry.process.is_current() && (entry.storage.expired() || entry.pending->is_finished())) {
        erase(storage, entry.pending);
      }
    }
    const std::lock_guard lock(mutex_);
    sweep_size_ = std::max(kMinSweepSize, 2 * entries_.size());
  }

  static constexpr size_t kMinSweepSize = 64;
  ForkSafeMutex mutex_;
  std::unordered_map<c10::StorageImpl*, Entry> entries_;
  size_t sweep_size_ = kMinSweepSize;
};

PendingWorks& pending() { return LeakySingleton<PendingWorks>::get(); }

constexpr c10::DispatchKeySet kTracedKeys(
    {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize,
     c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
     c10::DispatchKey::BatchedNestedTensor});

}  // namespace

void register_pending_work(std::string_view op, const at::Tensor& input, const at::Tensor& out,
                           WorkPtr work) {
  pending().add(out, std::make_shared<PendingWork>(op, input, std::move(work)));
}

void wait_for_work(const at::Tensor& tensor) {
  const auto found = pending().find(tensor);
  if (!found) return;
  // A work that is still running stays registered: another stream or thread may have to wait for it
  // too, and a wait that was refused (inside a graph capture) can be repeated.
  try {
    found->wait();
  } catch (...) {
    if (found->is_completed()) pending().erase(tensor, found);
    throw;
  }
  found->check_input();  // if it throws, the result stays invalid for its lifetime
  if (found->is_completed()) pending().erase(tensor, found);
}

at::Tensor clone_if_unversioned(const at::Tensor& sent, const at::Tensor& x) {
  return x.is_inference() && sent.is_alias_of(x) ? sent.clone() : sent;
}

int64_t pending_works() { return pending().size(); }

bool can_start_async(const at::Tensor& x) {
  return !x.is_meta() && !x.key_set().has_any(kTracedKeys) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

bool needs_autograd(const at::Tensor& x) {
  return (at::GradMode::is_enabled() && x.requires_grad()) || has_tangent(x);
}

bool has_tangent(const at::Tensor& x) { return x._fw_grad(/*level=*/0).defined(); }

}  // namespace torch_overlap::ops
