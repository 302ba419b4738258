#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string_view>

#include "torch_overlap/overlap/device.h"

namespace torch_overlap {

// Transport through memory that the ranks of a host share.
class CpuTransport final : public Transport {
 public:
  CpuTransport(std::shared_ptr<SymmetricMemory> memory, PeerMappedOptions options)
      : memory_(std::move(memory)), options_(std::move(options)) {}

  std::string_view name() const override { return "shared memory"; }
  bool is_peer_mapped() const override { return true; }
  void begin(const EntryPayload& entry) override;
  void exchange(OverlapStreams& streams, int stream, const Move& move) override;
  void wait_for_flags(OverlapStreams& streams, int stream, const std::vector<int>& flags) override;
  void post(OverlapStreams& streams, int stream, int flag) override;
  at::Tensor peer(int rank, int64_t at, c10::IntArrayRef sizes,
                  at::ScalarType dtype) const override;

 private:
  template <typename Word>
  std::atomic_ref<Word> word(int rank, int64_t at) const;
  // Returns a poll that is true when load() has reached `epoch`. It throws after the timeout,
  // counted from its first call. `does` is for the error: what `rank` has to do in the operation of
  // that epoch.
  template <typename Load>
  std::function<bool()> make_epoch_poll(Load load, uint32_t epoch, int rank,
                                        std::string_view does) const;

  const std::shared_ptr<SymmetricMemory> memory_;
  const PeerMappedOptions options_;
  uint32_t epoch_ = 0;
  // Ranks that raise a flag of this rank in this operation, for flags that their owner does not
  // raise: a forwarded chunk is sent by a neighbour, also after its owner has done its part and
  // left.
  std::map<int, int> flag_senders_;
};

}  // namespace torch_overlap
