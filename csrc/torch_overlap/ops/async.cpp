#include "torch_overlap/ops/async.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torch_overlap/base/process.h"

namespace torch_overlap::ops {
namespace {

// A weak reference keeps the StorageImpl's address from being used again while the entry exists.
struct Entry {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  WorkPtr work;
  ProcessStamp process;
};

// Works are asked and dropped outside the lock: either may need Python's, or take long.
class PendingWorks {
 public:
  void add(const at::Tensor& tensor, WorkPtr work) {
    const auto& storage = tensor.storage();
    Entry entry{.storage = storage.getWeakStorageImpl(), .work = std::move(work), .process = {}};
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

  WorkPtr find(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(tensor.storage().unsafeGetStorageImpl());
    return found == entries_.end() ? nullptr : found->second.work;
  }

  // Forgets `work`, which the caller still holds, unless another one writes the tensor by now.
  void erase(const at::Tensor& tensor, const WorkPtr& work) {
    erase(tensor.storage().unsafeGetStorageImpl(), work);
  }

  int64_t size() {
    sweep();
    const std::lock_guard lock(mutex_);
    return static_cast<int64_t>(entries_.size());
  }

 private:
  void erase(c10::StorageImpl* storage, const WorkPtr& work) {
    Entry erased;
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(storage);
    if (found == entries_.end() || found->second.work != work) return;
    if (!found->second.process.is_current()) return;  // each wait for it is refused
    erased = std::move(found->second);
    entries_.erase(found);
  }

  // Takes out what needs no wait any more: the result is dead, or it is there. A work that failed
  // stays for its wait() to throw, and so does one of a fork's parent.
  void sweep() {
    std::vector<std::pair<c10::StorageImpl*, Entry>> all;
    {
      const std::lock_guard lock(mutex_);
      all.assign(entries_.begin(), entries_.end());
    }
    for (const auto& [storage, entry] : all) {
      if (entry.process.is_current() && (entry.storage.expired() || is_there(*entry.work))) {
        erase(storage, entry.work);
      }
    }
    const std::lock_guard lock(mutex_);
    sweep_at_ = std::max(kSweepAt, 2 * entries_.size());
  }

  static bool is_there(TorchWork& work) {
    try {
      return work.is_completed() && work.status() == WorkStatus::COMPLETED;
    } catch (const std::exception&) {  // one of Python's; its wait() tells
      return false;
    }
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

void note_work(const at::Tensor& tensor, WorkPtr work) {
  if (work) pending().add(tensor, std::move(work));
}

void wait_for_work(const at::Tensor& tensor) {
  const auto work = pending().find(tensor);
  if (!work) return;
  // A work that goes on stays: another stream or thread may have to wait for it too, and a wait
  // that was refused (inside a graph capture) can be made again.
  try {
    work->wait();
  } catch (...) {
    if (work->is_completed()) pending().erase(tensor, work);
    throw;
  }
  if (work->is_completed()) pending().erase(tensor, work);
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
