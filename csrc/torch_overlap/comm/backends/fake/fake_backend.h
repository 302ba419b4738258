#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "torch_overlap/comm/backend.h"

namespace torch_overlap {

// A communicator of any size without peers, for tracing, planning, and tests that only issue
// operations. Every operation is complete when it returns. The results are those of a group in
// which every rank passes the same tensors as this one:
//
//   all_reduce, reduce   SUM: n x; AVG, MIN, MAX, BAND, BOR: x; PRODUCT: x^n; BXOR: x or 0;
//                        PREMUL_SUM: n f x
//   all_gather, gather   every part is the input; a part of another size is zeros
//   reduce_scatter       the reduction of n times this rank's part
//   all_to_all           every part is this rank's own
//   broadcast, barrier   no-op
//   scatter              zeros, except at the root
//   recv                 zeros, except from this rank
//   put                  no-op, except to this rank
//   signal, wait_signal  no-op
//
// After abort(), issue() throws; finalize() is a no-op. Nothing can time out.
class FakeBackend final : public Backend {
 public:
  explicit FakeBackend(const BackendContext& context);

  std::string version() const override { return "1"; }
  WorkPtr issue(Call call) override;
  std::shared_ptr<Backend> split(const SplitRequest& request) override;
  std::shared_ptr<Backend> regroup(const std::function<RegroupRequest()>& rendezvous,
                                   Milliseconds /*timeout*/) override {
    return std::make_shared<FakeBackend>(rendezvous().context);
  }
  void finalize() override {}
  void abort() override { aborted_.store(true); }
  bool is_aborted() const override { return aborted_.load(); }
  bool has_windows() const override { return true; }
  bool has_tags() const override { return true; }

 private:
  const BackendContext context_;
  std::atomic<bool> aborted_{false};
};

}  // namespace torch_overlap
