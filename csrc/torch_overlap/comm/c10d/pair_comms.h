#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <tuple>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/c10d/work_wrapper.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {

// Identifies a communicator of two ranks: the sender is rank 0, the receiver rank 1.
struct PairKey {
  int src = 0;
  int dst = 0;
  int tag = 0;

  bool operator<(const PairKey& other) const {
    return std::tie(src, dst, tag) < std::tie(other.src, other.dst, other.tag);
  }
};

// Communicators for single sends and receives on devices whose library matches messages by order
// only (NCCL): one for each sender, receiver and tag. None of them waits for another, so messages
// match in any order in which the ranks issue them.
//
// The first message creates the communicator, on a separate thread, because the other rank may
// issue its half late, or after halves that match other messages of this rank. Until the
// communicator exists, messages are queued. They run after the work that was on the current stream
// when they were issued, and waiting for one blocks the host until its communicator exists.
//
// Threads: any.
class TORCH_OVERLAP_API PairComms {
 public:
  using CommPtr = std::shared_ptr<TorchComm>;
  using C10dWork = c10::intrusive_ptr<c10d::Work>;
  using CommFactory = std::function<CommPtr(const PairKey&, c10::Device)>;
  // Issues one message on its communicator, on the current stream.
  using Issue = std::function<C10dWork(TorchComm&)>;

  // `make` is called on other threads, possibly after this object is destroyed.
  explicit PairComms(CommFactory make);
  ~PairComms();
  PairComms(const PairComms&) = delete;
  PairComms& operator=(const PairComms&) = delete;

  // `parts`: the properties of the message's work before the message is issued. Throws if the
  // pair's communicator could not be created, and after close().
  C10dWork issue(const PairKey& key, c10::Device device, const WorkParts& parts, Issue issue);
  // Returns the existing communicators, in an order that is the same on all ranks.
  std::vector<CommPtr> comms() const;
  // Issues no further messages. Queued messages fail with `reason`.
  void close(const std::string& reason);

 private:
  class Pair;
  struct Shared;

  const std::shared_ptr<Shared> shared_;
};

}  // namespace torch_overlap
