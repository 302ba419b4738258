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

// The work that writes a result, and the version of the input that it was made of.
class Pending {
 public:
  Pending(std::string_view op, const at::Tensor& input, WorkPtr work)
      : op_(op), work_(std::move(work)), input_(input.unsafeGetTensorImpl()->version_counter()) {
    // Views of one buffer share a version: a change of another part says nothing of this one.
    const bool is_whole = input.nbytes() == input.storage().nbytes();
    is_checked_ = input_.enabled() && is_whole;
    if (is_checked_) version_ = input_.current_version();
  }

  void wait() {
    if (work_) work_->wait();
  }
  // Throws if the input was changed before the first wait. Afterwards it is the caller's again, and
  // threads that still wait must not mistake what is done with it then for a change before: so
  // `was_waited_for_` is set by the first check that passes, and looked at behind the version.
  void check_input() {
    const bool is_changed = is_checked_ && input_.current_version() != version_;
    TORCH_OVERLAP_CHECK(!is_changed || was_waited_for_, kState,
                        "wait_tensor: expected the input of ", op_,
                        "_async unchanged until its result is waited for, got one that was "
                        "changed in place. Call wait_tensor before the change, or pass a clone.");
    was_waited_for_ = true;
  }

  bool is_completed() const { return !work_ || work_->is_completed(); }
  // The result is there, and a wait for it has nothing left to find.
  bool is_over() const {
    try {
      return was_waited_for_ &&
             (!work_ || (work_->is_completed() && work_->status() == WorkStatus::COMPLETED));
    } catch (const std::exception&) {  // one of Python's; its wait() tells
      return false;
    }
  }

 private:
  const std::string_view op_;  // lives as long as the process
  const WorkPtr work_;         // null: nothing was sent
  const c10::VariableVersion input_;
  bool is_checked_ = false;
  uint32_t version_ = 0;
  std::atomic<bool> was_waited_for_ = false;
};
using PendingPtr = std::shared_ptr<Pending>;

// A weak reference keeps the StorageImpl's address from being used again while the entry exists.
struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  PendingPtr pending;
  ProcessStamp process;
};

// Works are asked and dropped outside the lock: either may need Python's, or take long.
class PendingWorks {
 public:
  void add(const at::Tensor& tensor, PendingPtr pending) {
    const auto& storage = tensor.storage();
    Entry entry{
        .storage = storage.getWeakStorageImpl(), .pending = std::move(pending), .process = {}};
    bool is_full = false;
    {
      const std::lock_guard lock(mutex_);
      std::swap(entries_[storage.unsafeGetStorageImpl()], entry);
      is_full = entries_.size() >= sweep_at_;
      // By one thread, which may come here again by what it asks.
      if (is_full) sweep_at_ = 2 * entries_.size();
    }
    if (is_full) sweep();
  }

  PendingPtr find(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(tensor.storage().unsafeGetStorageImpl());
    return found == entries_.end() ? nullptr : found->second.pending;
  }

  // Forgets what the caller still holds, unless something else writes the tensor by now.
  void erase(const at::Tensor& tensor, const PendingPtr& pending) {
    erase(tensor.storage().unsafeGetStorageImpl(), pending);
  }

  int64_t size() {
    sweep();
    const std::lock_guard lock(mutex_);
    return static_cast<int64_t>(entries_.size());
  }

 private:
  void erase(c10::StorageImpl* storage, const PendingPtr& pending) {
    Entry erased;
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(storage);
    if (found == entries_.end() || found->second.pending != pending) return;
    if (!found->second.process.is_current()) return;  // each wait for it is refused
    erased = std::move(found->second);
    entries_.erase(found);
  }

  // Takes out what needs no wait any more: the result is dead, or it is there and was waited for. A
  // work that failed stays for its wait() to throw, and so does one of a fork's parent.
  void sweep() {
    std::vector<std::pair<c10::StorageImpl*, Entry>> all;
    {
      const std::lock_guard lock(mutex_);
      all.assign(entries_.begin(), entries_.end());
    }
    for (const auto& [storage, entry] : all) {
      if (entry.process.is_current() && (entry.storage.expired() || entry.pending->is_over())) {
        erase(storage, entry.pending);
      }
    }
    const std::lock_guard lock(mutex_);
    sweep_at_ = std::max(kSweepAt, 2 * entries_.size());
  }

  static constexpr size_t kSweepAt = 64;
  ForkSafeMutex mutex_;
  std::unordered_map<c10::StorageImpl*, Entry> entries_;
  size_t sweep_at_ = kSweepAt;
};

PendingWorks& pending() { return ProcessWide<PendingWorks>::get(); }

constexpr c10::DispatchKeySet kTracedKeys(
    {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::Functionalize,
     c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
     c10::DispatchKey::BatchedNestedTensor});

}  // namespace

void note_work(std::string_view op, const at::Tensor& input, const at::Tensor& out, WorkPtr work) {
  pending().add(out, std::make_shared<Pending>(op, input, std::move(work)));
}

void wait_for_work(const at::Tensor& tensor) {
  const auto found = pending().find(tensor);
  if (!found) return;
  // A work that goes on stays: another stream or thread may have to wait for it too, and a wait
  // that was refused (inside a graph capture) can be made again.
  try {
    found->wait();
  } catch (...) {
    if (found->is_completed()) pending().erase(tensor, found);
    throw;
  }
  found->check_input();  // where it throws, the result stays spoiled as long as it lives
  if (found->is_completed()) pending().erase(tensor, found);
}

at::Tensor sent_later(const at::Tensor& sent, const at::Tensor& x) {
  return x.is_inference() && sent.is_alias_of(x) ? sent.clone() : sent;
}

int64_t pending_works() { return pending().size(); }

bool can_start_async(const at::Tensor& x) {
  return !x.is_meta() && !x.key_set().has_any(kTracedKeys) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

bool needs_autograd(const at::Tensor& x) {
  return (at::GradMode::is_enabled() && x.requires_grad()) || x._fw_grad(/*level=*/0).defined();
}

}  // namespace torch_overlap::ops
