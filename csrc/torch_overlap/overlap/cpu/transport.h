#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "torch_overlap/overlap/device.h"

namespace torch_overlap {

// Through memory that the ranks of a host share.
class CpuTransport final : public Transport {
 public:
  CpuTransport(std::shared_ptr<SymmetricMemory> memory, DirectOptions options)
      : memory_(std::move(memory)), options_(std::move(options)) {}

  std::string_view name() const override { return "shared memory"; }
  bool is_direct() const override { return true; }
  void begin(const Begin& operation) override;
  void exchange(Lanes& lanes, int lane, const Move& move) override;
  void arrived(Lanes& lanes, int lane, const std::vector<int>& flags) override;
  void post(Lanes& lanes, int lane, int flag) override;
  at::Tensor peer(int rank, int64_t at, c10::IntArrayRef sizes,
                  at::ScalarType dtype) const override;

 private:
  template <typename Word>
  std::atomic_ref<Word> word(int rank, int64_t at) const;
  // Says whether load() has come to `epoch`; throws when that takes longer than the timeout,
  // counted from the first time that it is asked. For the error: what `rank` does, in the operation
  // of that epoch or the next one.
  template <typename Load>
  std::function<bool()> reaches(Load load, uint32_t epoch, int rank, std::string_view does) const;

  const std::shared_ptr<SymmetricMemory> memory_;
  const DirectOptions options_;
  uint32_t epoch_ = 0;
  // Of this operation: who raises a flag of this rank, where it is not the one that it is of. What
  // goes round comes from a neighbour, also when its owner has done its part and left.
  std::map<int, int> raisers_;
};

}  // namespace torch_overlap
