#include "torch_overlap/comm/recorder.h"

#include <algorithm>
#include <mutex>

#include "torch_overlap/base/env.h"

namespace torch_overlap {

FlightRecorder::FlightRecorder(size_t capacity) : capacity_(capacity), ring_(capacity) { reset(); }

FlightRecorder& FlightRecorder::of_process() {
  return lazy_leaky_singleton([] { return FlightRecorder(Env::recorder_size()); });
}

size_t FlightRecorder::size() const {
  const std::lock_guard lock(mutex_);
  return std::min<size_t>(added_, capacity_);
}

void FlightRecorder::add(CallRecordPtr record) noexcept {
  if (!is_enabled()) return;
  const std::lock_guard lock(mutex_);
  ring_[added_++ % capacity_].swap(record);  // the old record is destroyed after the lock
}

std::vector<CallRecordPtr> FlightRecorder::records() const {
  std::vector<CallRecordPtr> found;
  found.reserve(size());
  const std::lock_guard lock(mutex_);
  const uint64_t kept = std::min<uint64_t>(added_, capacity_);
  for (uint64_t index = added_ - kept; index < added_; ++index) {
    found.push_back(ring_[index % capacity_]);
  }
  return found;
}

void FlightRecorder::reset() {
  std::vector<CallRecordPtr> forgotten(capacity_);
  const std::lock_guard lock(mutex_);
  ring_.swap(forgotten);
  added_ = 0;
  first_ids_ = trace_counts();
}

uint64_t FlightRecorder::record_id(const CallRecord& record) const {
  std::lock_guard lock(mutex_);
  const auto found = first_ids_.find(record.comm->trace_ids);
  return record.trace_id - (found != first_ids_.end() ? found->second : 0);
}

}  // namespace torch_overlap
