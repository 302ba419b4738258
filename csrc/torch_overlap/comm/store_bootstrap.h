#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>

#include "torch_overlap/comm/bootstrap.h"
#include "torch_overlap/comm/options.h"
#include "torch_overlap/symm/bootstrap.h"

namespace torch_overlap {

// A Bootstrap over a communicator's store, for one object that is set up (and later torn down).
// `name` is unique to that object in the store, and names it in errors.
class TORCH_OVERLAP_API StoreBootstrap final : public Bootstrap {
 public:
  StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, std::string name, int rank, int size,
                 Milliseconds timeout, ExchangeCallbacks owner = {});

  std::vector<std::string> all_gather(const std::string& mine) override;
  // Publishes this rank's part of the next all_gather, if it does not need the others' parts. Does
  // not wait.
  void publish(const std::string& mine);

 private:
  std::string next_key() { return concat(name_, ", step ", step_++); }

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string name_;
  const ExchangeCallbacks owner_;
  uint64_t step_ = 0;
};

}  // namespace torch_overlap
