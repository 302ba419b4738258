#include "torch_overlap/overlap/cpu/host_transport.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/overlap/channel.h"
#include "torch_overlap/overlap/cpu/host_lanes.h"

namespace torch_overlap {

using Clock = std::chrono::steady_clock;

std::atomic_ref<uint32_t> HostTransport::word(int rank, int64_t at) const {
  return std::atomic_ref(
      *reinterpret_cast<uint32_t*>(static_cast<std::byte*>(memory_->pointer(rank)) + at));
}

std::function<bool()> HostTransport::reaches(int64_t at, uint32_t epoch, int rank,
                                             std::string_view does, uint32_t next) const {
  return [this, at, epoch, rank, does, next, until = Clock::time_point()]() mutable {
    const uint32_t seen = word(memory_->rank(), at).load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - epoch) >= 0) return true;
    const auto now = Clock::now();
    const auto timeout = options_.group->timeout();
    if (until == Clock::time_point()) until = now + timeout;
    TORCH_OVERLAP_CHECK(now < until, kTimeout, memory_->name(), ": expected rank ", rank, " to ",
                        does, " operation ", epoch + next, " within ", timeout.count(),
                        " ms, got operation ", seen + next, "; do all ranks make the same calls?");
    return false;
  };
}

void HostTransport::begin() {
  const auto& layout = options_.layout;
  for (int rank = 0; rank < memory_->size(); ++rank) {
    word(rank, layout.done_at(memory_->rank())).store(epoch_, std::memory_order_release);
  }
  for (int rank = 0; rank < memory_->size(); ++rank) {
    if (rank == memory_->rank()) continue;
    const auto has_begun = reaches(layout.done_at(rank), epoch_, rank, "begin", /*next=*/1);
    while (!has_begun()) std::this_thread::yield();
  }
  ++epoch_;
}

void HostTransport::end() {}

void HostTransport::exchange(Lanes& lanes, int lane, const Move& move) {
  lanes.run(lane, "exchange", [this, move] {
    auto* const there = static_cast<std::byte*>(memory_->pointer(move.to)) + move.at;
    if (move.give.numel() > 0) {
      std::memcpy(there, move.give.const_data_ptr(), move.give.nbytes());
    }
    word(move.to, options_.layout.flag_at(move.flag)).store(epoch_, std::memory_order_release);
  });
}

void HostTransport::arrived(Lanes& lanes, int lane, const std::vector<int>& flags) {
  auto& host = static_cast<HostLanes&>(lanes);
  for (const int flag : flags) {
    host.until(lane, reaches(options_.layout.flag_at(flag), epoch_, flag % memory_->size(),
                             "do its part of", /*next=*/0));
  }
}

void HostTransport::post(Lanes& lanes, int lane, int flag) {
  lanes.run(lane, "post", [this, flag] {
    for (int rank = 0; rank < memory_->size(); ++rank) {
      word(rank, options_.layout.flag_at(flag + memory_->rank()))
          .store(epoch_, std::memory_order_release);
    }
  });
}

at::Tensor HostTransport::peer(int rank, int64_t at, c10::IntArrayRef sizes,
                               at::ScalarType dtype) const {
  return memory_->view(rank, sizes, dtype, at);
}

}  // namespace torch_overlap
