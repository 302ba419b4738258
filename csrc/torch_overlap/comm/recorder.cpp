#include "torch_overlap/comm/recorder.h"

#include <utility>

#include "torch_overlap/base/env.h"

namespace torch_overlap {

FlightRecorder::FlightRecorder(size_t capacity) : capacity_(capacity), ring_(capacity) { reset(); }

FlightRecorder& FlightRecorder::of_process() {
  static auto* const instance = new FlightRecorder(Env::read().recorder_size);
  return *instance;
}

void FlightRecorder::add(CallRecordPtr record) noexcept {
  if (!is_enabled()) return;
  const std::lock_guard lock(mutex_);
  ring_[added_++ % capacity_].swap(record);  // what was there dies after the lock
}

std::vector<CallRecordPtr> FlightRecorder::records() const {
  std::vector<CallRecordPtr> found;
  found.reserve(capacity_);
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < capacity_; ++i) {
    const CallRecordPtr& record = ring_[(added_ + i) % capacity_];
    if (record) found.push_back(record);
  }
  return found;
}

void FlightRecorder::reset() {
  std::vector<CallRecordPtr> forgotten(capacity_);
  const std::lock_guard lock(mutex_);
  ring_.swap(forgotten);
  first_ids_ = trace_counts();
}

uint64_t FlightRecorder::record_id(const CallRecord& record) const {
  std::lock_guard lock(mutex_);
  const auto found = first_ids_.find(record.comm->trace_ids);
  return record.trace_id - (found != first_ids_.end() ? found->second : 0);
}

}  // namespace torch_overlap
