#include "torch_overlap/comm/recorder.h"

#include <thread>
#include <utility>

#include "torch_overlap/base/env.h"

namespace torch_overlap {

class FlightRecorder::Slot {
 public:
  // Keeps the newer of two records that fight for the slot; the other one dies after the lock.
  void put(uint64_t index, CallRecordPtr& record) noexcept {
    const Lock lock(*this);
    if (record_ && index < index_) return;
    index_ = index;
    record_.swap(record);
  }

  // Null if the slot holds another one by now, or not yet this.
  CallRecordPtr get(uint64_t index) const {
    const Lock lock(*this);
    return record_ && index_ == index ? record_ : nullptr;
  }

  CallRecordPtr take() {
    const Lock lock(*this);
    return std::exchange(record_, nullptr);
  }

 private:
  // Held for a few instructions, and hardly ever by two threads.
  class Lock {
   public:
    explicit Lock(const Slot& slot) noexcept : busy_(slot.busy_) {
      while (busy_.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
    }
    ~Lock() { busy_.clear(std::memory_order_release); }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    std::atomic_flag& busy_;
  };

  mutable std::atomic_flag busy_;
  uint64_t index_ = 0;
  CallRecordPtr record_;
};

FlightRecorder::FlightRecorder(size_t capacity)
    : capacity_(capacity), slots_(std::make_unique<Slot[]>(capacity)) {
  reset();
}

FlightRecorder::~FlightRecorder() = default;

FlightRecorder& FlightRecorder::of_process() {
  static auto* const instance = new FlightRecorder(Env::read().recorder_size);
  return *instance;
}

void FlightRecorder::add(CallRecordPtr record) noexcept {
  if (!is_enabled()) return;
  const uint64_t index = next_.fetch_add(1, std::memory_order_relaxed);
  slots_[index % capacity_].put(index, record);
}

std::vector<CallRecordPtr> FlightRecorder::records() const {
  std::vector<CallRecordPtr> found;
  const uint64_t end = next_.load(std::memory_order_relaxed);
  const uint64_t begin = end > capacity_ ? end - capacity_ : 0;
  for (uint64_t index = begin; index < end; ++index) {
    if (auto record = slots_[index % capacity_].get(index)) found.push_back(std::move(record));
  }
  return found;
}

void FlightRecorder::reset() {
  for (size_t i = 0; i < capacity_; ++i) slots_[i].take();
  std::lock_guard lock(mutex_);
  first_ids_ = trace_counts();
}

uint64_t FlightRecorder::record_id(const CallRecord& record) const {
  std::lock_guard lock(mutex_);
  const auto found = first_ids_.find(record.comm->trace_ids);
  return record.trace_id - (found != first_ids_.end() ? found->second : 0);
}

}  // namespace torch_overlap
