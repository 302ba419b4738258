// One-sided operations between ranks that map each other's memory: copies and atomic counters.
#include "torch_overlap/comm/host/host_window.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/host/host_primitives.h"

namespace torch_overlap {
namespace {

// A wait spins first, to see a signal that arrives soon; a longer wait sleeps between polls.
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr auto kMinPollInterval = std::chrono::microseconds(10);
constexpr auto kMaxPollInterval = std::chrono::microseconds(500);

using Count = std::atomic_ref<uint64_t>;
static_assert(Count::is_always_lock_free, "processes share no locks");

}  // namespace

uint64_t take_ticket(SymmetricMemory& window, int src) {
  return Count(*window.signals().consumed(src)).fetch_add(1, std::memory_order_relaxed) + 1;
}

void HostPrimitives::put(SymmetricMemory& window, const at::Tensor& tensor, int dst,
                         int64_t offset) {
  if (tensor.nbytes() == 0) return;
  // The source may overlap the target.
  std::memmove(static_cast<std::byte*>(window.pointer(dst)) + offset, tensor.const_data_ptr(),
               tensor.nbytes());
}

void HostPrimitives::signal(SymmetricMemory& window, int dst) {
  Count(*window.signals().to(dst)).fetch_add(1, std::memory_order_release);
}

void HostPrimitives::wait_signal(SymmetricMemory& window, int src, uint64_t ticket) {
  if (ticket == 0) ticket = take_ticket(window, src);
  const Count arrived(*window.signals().arrived(src));
  const auto begin = HostClock::now();
  auto poll_interval = kMinPollInterval;
  while (true) {
    const bool is_long = HostClock::now() - begin >= kSpinTime;
    // Read before the count: a rank may signal and then leave.
    const std::string left = is_long ? transport_.departure_reason(src) : "";
    const uint64_t seen = arrived.load(std::memory_order_acquire);
    if (seen >= ticket) return;
    if (broken_.load(std::memory_order_acquire)) {
      fail(ErrorKind::kState, "ended without a signal: the communicator failed or was aborted");
    }
    if (!left.empty()) {
      has_started_ = true;  // breaks the communicator, as a failed message does
      fail(ErrorKind::kRuntime, left);
    }
    const auto now = HostClock::now();
    if (now >= deadline_) {
      fail(ErrorKind::kTimeout, "expected signal ", ticket, " of rank ", src, " in window '",
           window.name(), "' within ", timeout_.count(), " ms, got ", seen, "; look at what rank ",
           src, " does");
    }
    if (!is_long) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::min<HostClock::duration>(poll_interval, deadline_ - now));
      poll_interval = std::min(poll_interval * 2, kMaxPollInterval);
    }
  }
}

}  // namespace torch_overlap
