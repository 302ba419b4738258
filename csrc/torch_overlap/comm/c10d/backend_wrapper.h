#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/c10d/work_wrapper.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {

// `pg_options` of init_process_group and new_group. c10d sets timeout and group_name.
struct TORCH_OVERLAP_API BackendOptions final : c10d::Backend::Options {
  explicit BackendOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout);

  // The communicator backend of each device type; a type that is not named is refused.
  std::map<std::string, std::string> backends{{"cpu", "gloo"}, {"cuda", "nccl"}};
  // For every communicator of the group; its name, timeout and store are the group's.
  CommOptions comm;
};

// torch.distributed's backend "torch_overlap": one rank's end of one process group.
//
// c10d registers one object of a custom backend for all device types, so this holds a communicator
// for each. The CPU one is made with the group. The CUDA one is made by the first collective, which
// all ranks therefore must enter; or with the group, when init_process_group got a device_id. Until
// it was made that way, a send or recv outside of batch_isend_irecv runs on a communicator of the
// two ranks (the others need not take part), as with c10d's own NCCL backend. Over an existing
// communicator there is that one only.
//
// Tags are not sent: messages between two ranks match in the order of issue, on every device.
// Inputs that are only read may be non-contiguous and are copied. Tensors that are both read and
// written, and those of send and recv, may be dense in any order of dimensions. Outputs must be
// contiguous. asyncOp=false runs CUDA operations on the current stream; a barrier blocks the host.
//
// Life: shutdown() finalizes, the destructor aborts what was not. Threads: any, but see TorchComm;
// coalescing belongs to the thread that started it.
class TORCH_OVERLAP_API BackendWrapper final : public c10d::Backend {
 public:
  using CommPtr = std::shared_ptr<TorchComm>;
  using Ms = std::chrono::milliseconds;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using C10dWork = c10::intrusive_ptr<c10d::Work>;

  // Over a communicator that the caller made. shutdown() finalizes it, if nobody has.
  explicit BackendWrapper(CommPtr comm);
  // Collective over the ranks of `store`.
  BackendWrapper(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                 c10::intrusive_ptr<BackendOptions> options);

  // The communicator that `device` uses; makes it if need be (collective).
  CommPtr comm_for(c10::Device device);
  // What this group alone writes into; null over a communicator without peers.
  c10::intrusive_ptr<c10d::Store> store() const;
  // All communicators of the whole group that exist.
  std::vector<CommPtr> comms() const;

  const std::string getBackendName() const override;
  // A copy: c10d's split_group writes the new group's name into what it gets.
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(Ms timeout) override;
  void eagerConnectSingleDevice(at::Device device) override;
  // Null where `ranks` does not name this rank; all ranks of this group must call it.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Sends and receives until endCoalescing become one batch; collectives are issued as they come,
  // in order. endCoalescing returns one Work for all of them, null if there was none. An operation
  // that throws ends the coalescing, because torch's own manager then does not: sends and receives
  // that wait for the batch are dropped, and the next operation is issued as it comes.
  void startCoalescing() override;
  C10dWork endCoalescing() override;

  C10dWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  C10dWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  C10dWork allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  C10dWork allreduce_coalesced(Tensors& tensors,
                               const c10d::AllreduceCoalescedOptions& opts) override;
  C10dWork reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  // Outputs may share memory: the highest rank's data stays.
  C10dWork allgather(TensorLists& outputs, Tensors& inputs,
                     const c10d::AllgatherOptions& opts) override;
  C10dWork _allgather_base(at::Tensor& output, at::Tensor& input,
                           const c10d::AllgatherOptions& opts) override;
  C10dWork allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                               const c10d::AllgatherOptions& opts) override;
  C10dWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& opts) override;
  C10dWork gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  C10dWork scatter(Tensors& outputs, TensorLists& inputs,
                   const c10d::ScatterOptions& opts) override;
  C10dWork reduce_scatter(Tensors& outputs, TensorLists& inputs,
                          const c10d::ReduceScatterOptions& opts) override;
  C10dWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& opts) override;
  C10dWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::ReduceScatterOptions& opts) override;
  C10dWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                         std::vector<int64_t>& input_splits,
                         const c10d::AllToAllOptions& opts) override;
  C10dWork alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  C10dWork send(Tensors& tensors, int dst, int tag) override;
  C10dWork recv(Tensors& tensors, int src, int tag) override;
  C10dWork recvAnysource(Tensors& tensors, int tag) override;
  C10dWork barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

 private:
  // A communicator of the whole group. `eager`: it was there before the first operation, on all
  // ranks, so sends and receives may rely on it.
  struct Slot {
    CommPtr comm;
    bool eager = false;
  };
  using Slots = std::map<c10::DeviceType, Slot>;
  struct Coalescing {
    std::vector<P2POp> p2p;
    WorkParts parts;  // of the Work that endCoalescing returns
  };
  // A communicator of two ranks: lower, higher.
  using PairKey = std::pair<int, int>;

  // The part of a split; `slots` are split communicators.
  BackendWrapper(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                 c10::intrusive_ptr<BackendOptions> options, Slots slots);
  CommPtr make_comm(c10::Device device, const std::string& suffix,
                    c10::intrusive_ptr<c10d::Store> store, RankAndSize who) const;
  CommPtr group_comm(c10::Device device, bool eager);
  // The communicator for a message to or from `peer`, and the peer's rank in it.
  std::pair<CommPtr, int> comm_for_peer(c10::Device device, int peer, std::string_view op);
  c10::Device barrier_device(const c10d::BarrierOptions& opts) const;
  std::vector<CommPtr> all_comms() const;
  OpOptions op_options(Ms timeout) const;
  bool is_coalescing() const { return coalescing_thread_.load() == std::this_thread::get_id(); }
  Coalescing drop_coalescing();
  template <typename Body>
  C10dWork operation(const Body& body);
  C10dWork wrap(c10d::OpType type, std::vector<WorkPtr> works, Tensors outputs);
  C10dWork wrap(WorkParts parts);
  C10dWork point_to_point(P2POp::Type type, const at::Tensor& tensor, int peer, int tag);

  const c10::intrusive_ptr<c10d::Store> store_;  // null over an existing communicator
  const CommPtr fixed_;                          // that communicator
  const c10::intrusive_ptr<BackendOptions> options_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<uint64_t> monitored_barriers_{0};

  mutable std::mutex mutex_;  // guards the five below; never held while a communicator is made
  Slots slots_;
  std::map<PairKey, CommPtr> pairs_;
  WorkPtr last_work_;
  bool closed_ = false;
  std::mutex making_;  // one thread makes a communicator at a time

  std::atomic<std::thread::id> coalescing_thread_{};
  Coalescing coalescing_;  // touched by that thread only

  // c10d splits once for each device type and expects one backend for a custom type.
  std::string last_split_name_;
  c10::weak_intrusive_ptr<c10d::Backend> last_split_;
};

}  // namespace torch_overlap
