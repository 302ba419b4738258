#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "torch_overlap/comm/backend.h"

namespace torch_overlap {

// A communicator of any size without peers, for tracing, planning and tests of what only issues
// operations. Every operation is done when it returns, with the results that it would have if every
// rank passed the same tensors as this one:
//
//   all_reduce, reduce   SUM: n x; AVG, MIN, MAX, BAND, BOR: x; PRODUCT: x^n; BXOR: x or 0;
//                        PREMUL_SUM: n f x
//   all_gather, gather   every part is the input
//   reduce_scatter       the reduction of n times this rank's part
//   all_to_all           every part is this rank's own
//   broadcast, barrier   nothing changes
//   scatter, recv        away from the root there is nothing to take: zeros
//   put                  to another rank vanishes
//   signal, wait_signal  nothing happens
//
// abort() and finalize() only end it; nothing can time out.
class FakeBackend final : public Backend {
 public:
  explicit FakeBackend(const BackendContext& context);

  std::string version() const override { return "1"; }
  WorkPtr launch(Call call) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  std::shared_ptr<Backend> regroup(const std::function<RegroupRequest()>& meet,
                                   Milliseconds /*timeout*/) override {
    return std::make_shared<FakeBackend>(meet().context);
  }
  void finalize() override {}
  void abort() override { aborted_.store(true); }
  bool is_aborted() const override { return aborted_.load(); }
  bool has_windows() const override { return true; }

 private:
  const BackendContext context_;
  std::atomic<bool> aborted_{false};
};

}  // namespace torch_overlap
