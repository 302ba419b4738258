#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <tuple>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/c10d/work_wrapper.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {

// Names a communicator of two ranks: the sender's is rank 0, the receiver's rank 1.
struct PairKey {
  int src = 0;
  int dst = 0;
  int tag = 0;

  bool operator<(const PairKey& other) const {
    return std::tie(src, dst, tag) < std::tie(other.src, other.dst, other.tag);
  }
};

// Communicators for single sends and receives on devices whose library matches messages by order
// alone (NCCL): one for each sender, receiver and tag. None waits for another, so messages match in
// any order in which the ranks issue them.
//
// A communicator is made by the first message, on a thread of its own, because the other rank may
// issue its half late, or after halves that match others of this rank. Until then messages are
// queued: they run after the work that was on the current stream when they were issued, and
// waiting for one blocks the host until its communicator is there.
//
// Threads: any.
class TORCH_OVERLAP_API PairComms {
 public:
  using CommPtr = std::shared_ptr<TorchComm>;
  using C10dWork = c10::intrusive_ptr<c10d::Work>;
  using Make = std::function<CommPtr(const PairKey&, c10::Device)>;
  // Issues one message on its communicator, on the current stream.
  using Issue = std::function<C10dWork(TorchComm&)>;

  // `make` is called on other threads, also after this object is gone.
  explicit PairComms(Make make);
  ~PairComms();
  PairComms(const PairComms&) = delete;
  PairComms& operator=(const PairComms&) = delete;

  // `parts`: the properties that the message's work has before it is issued. Throws if the pair's
  // communicator could not be made, and after close().
  C10dWork issue(const PairKey& key, c10::Device device, const WorkParts& parts, Issue issue);
  // Those that exist, in an order that is the same on all ranks.
  std::vector<CommPtr> comms() const;
  // No message is issued any more; those that are queued fail with `reason`.
  void close(const std::string& reason);

 private:
  class Pair;
  struct Shared;

  const std::shared_ptr<Shared> shared_;
};

}  // namespace torch_overlap
