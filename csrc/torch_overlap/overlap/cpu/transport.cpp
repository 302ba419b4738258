#include "torch_overlap/overlap/cpu/transport.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/overlap/channel.h"
#include "torch_overlap/overlap/cpu/host_streams.h"
#include "torch_overlap/symm/entry.h"

namespace torch_overlap {

using Clock = std::chrono::steady_clock;

namespace {
constexpr unsigned int kPollsPerCheck = 1024;
}  // namespace

template <typename Word>
std::atomic_ref<Word> CpuTransport::word(int rank, int64_t at) const {
  return std::atomic_ref(
      *reinterpret_cast<Word*>(static_cast<std::byte*>(memory_->pointer(rank)) + at));
}

template <typename Load>
std::function<bool()> CpuTransport::make_epoch_poll(Load load, uint32_t epoch, int rank,
                                                    std::string_view does) const {
  return [this, load, epoch, rank, does, until = Clock::time_point(), asked = 0U]() mutable {
    // Every kPollsPerCheck polls: an abort of the communicator, or the departure of the rank, ends
    // the wait. The departure is read before the word: a rank may do its part and then leave.
    const bool looks = ++asked % kPollsPerCheck == 0;
    const std::string left = looks ? options_.group->departure_reason(rank) : "";
    const uint32_t seen = load();
    if (has_reached(seen, epoch)) return true;
    if (looks) options_.group->require_active(memory_->name());  // own abort first
    TORCH_OVERLAP_CHECK(left.empty(), kRuntime, memory_->name(), ": ", left);
    const auto now = Clock::now();
    const auto timeout = options_.group->timeout();
    if (until == Clock::time_point()) until = now + timeout;
    TORCH_OVERLAP_CHECK(now < until, kTimeout, memory_->name(), ": expected rank ", rank, " to ",
                        does, " operation ", epoch, " within ", timeout.count(),
                        " ms, got operation ", seen, "; do all ranks make the same calls?");
    return false;
  };
}

void CpuTransport::begin(const EntryPayload& entry) {
  const uint32_t payload = entry.word();
  ++epoch_;
  flag_senders_.clear();
  const auto flag_of = [this](int on, int of, uint32_t epoch) {
    const auto at = static_cast<int64_t>(sizeof(EntryFlag)) * entry_slot(epoch);
    return word<EntryFlag>(on, options_.layout.entry_flags_offset(of) + at);
  };
  const int here = memory_->rank();
  for (int rank = 0; rank < memory_->size(); ++rank) {
    flag_of(rank, here, epoch_).store(make_entry_flag(epoch_, payload), std::memory_order_release);
  }
  for (int rank = 0; rank < memory_->size(); ++rank) {
    if (rank == here) continue;
    const auto last = [flag_of, here, rank, epoch = epoch_] {
      const uint32_t now = epoch_of(flag_of(here, rank, epoch).load(std::memory_order_acquire));
      return later_epoch(now, epoch_of(flag_of(here, rank, epoch - 1).load()));
    };
    const auto has_begun = make_epoch_poll(last, epoch_, rank, "begin");
    while (!has_begun()) std::this_thread::yield();
    const uint32_t seen = payload_of(flag_of(here, rank, epoch_).load());
    TORCH_OVERLAP_CHECK(seen == payload, kValue,
                        describe_entry_mismatch(memory_->name(), entry, concat("on rank ", here),
                                                EntryPayload::of(seen), rank));
  }
}

void CpuTransport::exchange(OverlapStreams& streams, int stream, const Move& move) {
  flag_senders_.insert_or_assign(move.recv_flag, move.src);
  streams.run(stream, "exchange", [this, move] {
    auto* there = static_cast<std::byte*>(memory_->pointer(move.dst)) + move.dst_offset_bytes;
    const at::Tensor& send = move.send;
    if (send.numel() > 0 && move.dst_pitch_bytes == 0) {
      std::memcpy(there, send.const_data_ptr(), send.nbytes());
    } else if (send.numel() > 0) {
      const auto* here = static_cast<const std::byte*>(send.const_data_ptr());
      const auto element = static_cast<int64_t>(send.element_size());
      for (int64_t row = 0; row < send.size(0); ++row) {
        std::memcpy(there, here, send.size(1) * element);
        there += move.dst_pitch_bytes;
        here += send.stride(0) * element;
      }
    }
    if (move.flag == kNoFlag) return;
    word<uint32_t>(move.dst, options_.layout.flag_offset(move.flag))
        .store(epoch_, std::memory_order_release);
  });
}

void CpuTransport::wait_for_flags(OverlapStreams& streams, int stream,
                                  const std::vector<int>& flags) {
  auto& host = static_cast<HostStreams&>(streams);
  for (const int flag : flags) {
    const auto found = flag_senders_.find(flag);
    const int from = found == flag_senders_.end() ? flag % memory_->size() : found->second;
    const auto raised = [this, at = options_.layout.flag_offset(flag)] {
      return word<uint32_t>(memory_->rank(), at).load(std::memory_order_acquire);
    };
    host.until(stream, make_epoch_poll(raised, epoch_, from, "do its part of"));
  }
}

void CpuTransport::post(OverlapStreams& streams, int stream, int flag) {
  streams.run(stream, "post", [this, flag] {
    for (int rank = 0; rank < memory_->size(); ++rank) {
      word<uint32_t>(rank, options_.layout.flag_offset(flag + memory_->rank()))
          .store(epoch_, std::memory_order_release);
    }
  });
}

at::Tensor CpuTransport::peer(int rank, int64_t at, c10::IntArrayRef sizes,
                              at::ScalarType dtype) const {
  return memory_->view(rank, sizes, dtype, at);
}

}  // namespace torch_overlap
