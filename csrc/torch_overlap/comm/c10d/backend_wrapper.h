#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "torch_overlap/base/boundary.h"
#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/c10d/pair_comms.h"
#include "torch_overlap/comm/c10d/work_wrapper.h"
#include "torch_overlap/comm/torch_comm.h"

namespace torch_overlap {

// `pg_options` of init_process_group and new_group. c10d sets timeout and group_name.
struct TORCH_OVERLAP_API BackendOptions final : c10d::Backend::Options {
  explicit BackendOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout);

  // The communicator backend of each device type. Device types without an entry are refused.
  std::map<std::string, std::string> backends{{"cpu", "gloo"}, {"cuda", "nccl"}};
  // Options of every communicator of the group, except for name, timeout and store, which the group
  // sets.
  CommOptions comm;
  // Hints of CUDA communicators only, which override comm.hints.
  Hints cuda_hints;
};

// The torch.distributed backend "torch_overlap": one rank's end of one process group.
//
// c10d registers one object of a custom backend for all device types, so this class holds one
// communicator per device type. The CPU communicator is created with the group. The CUDA one is
// created by the first collective, which all ranks must therefore enter, or with the group if
// init_process_group got a device_id. A CUDA send or recv outside of batch_isend_irecv uses a
// communicator of its two ranks, for its direction and tag (pair_comms.h). A group over an existing
// communicator uses only that one.
//
// Messages between two ranks with equal tags match in order of issue. A receive from any rank is
// supported on the CPU. Ranks exchange elements in their logical order, whatever the strides of
// each rank's tensor. A tensor whose memory has another order is copied before the operation, after
// it, or both. Outputs of one operation may alias; the data of the last one stays. Written tensors
// keep their version counters, as with torch's backends. With
// asyncOp=false, CUDA operations run on the current stream; a barrier blocks the host.
//
// Lifetime: shutdown() finalizes; the destructor aborts communicators that were not finalized.
// Threads: any, within the rules of TorchComm. Coalescing belongs to the thread that started it.
class TORCH_OVERLAP_API BackendWrapper final : public c10d::Backend {
 public:
  using CommPtr = std::shared_ptr<TorchComm>;
  using Ms = std::chrono::milliseconds;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using C10dWork = c10::intrusive_ptr<c10d::Work>;

  // Wraps a communicator that the caller created. shutdown() finalizes it unless that was already
  // done.
  explicit BackendWrapper(CommPtr comm);
  // Collective over the ranks of `store`.
  BackendWrapper(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                 c10::intrusive_ptr<BackendOptions> options);

  // Returns the communicator that `device` uses. Creates it if it does not exist (collective).
  CommPtr comm_for(c10::Device device);
  // Returns the store that only this group writes; null over a communicator without peers.
  c10::intrusive_ptr<c10d::Store> store() const;
  // Returns all existing communicators of the whole group.
  std::vector<CommPtr> comms() const;

  const std::string getBackendName() const override;
  // Returns a copy, because c10d's split_group writes the new group's name into the returned
  // object.
  c10::intrusive_ptr<Options> getBackendOptions() override;
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(Ms timeout) override;
  void eagerConnectSingleDevice(at::Device device) override;
  // Returns null if `ranks` does not contain this rank. All ranks of this group must call it.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Sends and receives until endCoalescing become one batch. Collectives are issued immediately, in
  // order. endCoalescing returns one Work for all of them, or null if there were none. An operation
  // that throws ends the coalescing, because torch's manager does not in that case: sends and
  // receives that are queued for the batch are dropped, and the next operation is issued
  // immediately.
  void startCoalescing() override;
  C10dWork endCoalescing() override;

  C10dWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  C10dWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  C10dWork allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  C10dWork allreduce_coalesced(Tensors& tensors,
                               const c10d::AllreduceCoalescedOptions& opts) override;
  C10dWork reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
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
  // A communicator of the whole group. `eager`: it has existed on all ranks since before the first
  // operation, so sends and receives may use it.
  struct Slot {
    CommPtr comm;
    bool eager = false;
  };
  using Slots = std::map<c10::DeviceType, Slot>;
  struct Coalescing {
    std::vector<P2POp> p2p;
    WorkParts parts;  // parts of the Work that endCoalescing returns
  };
  // Creates one group of a split; `slots` are split communicators.
  BackendWrapper(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                 c10::intrusive_ptr<BackendOptions> options, Slots slots);
  static CommPtr make_comm(const BackendOptions& group, Ms timeout, c10::Device device,
                           const std::string& suffix, c10::intrusive_ptr<c10d::Store> store,
                           RankAndSize who);
  PairComms::CommFactory make_pair_factory() const;
  CommPtr group_comm(c10::Device device, bool eager);
  void close_pairs(std::string_view why);
  c10::Device barrier_device(const c10d::BarrierOptions& opts) const;
  std::vector<CommPtr> all_comms() const;
  OpOptions op_options(Ms timeout) const;
  bool is_coalescing() const { return coalescing_thread_.load() == std::this_thread::get_id(); }
  Coalescing drop_coalescing();
  // An error of `body` ends a coalescing, and is rethrown in the form that torch translates.
  template <typename Body>
  C10dWork operation(const Body& body) {
    try {
      return with_exception_translation(body);
    } catch (...) {
      if (is_coalescing()) drop_coalescing();
      throw;
    }
  }
  C10dWork all_reduce_each(Tensors& tensors, c10d::OpType type, const c10d::AllreduceOptions& opts);
  // Several tensors of one rank, which only torch's gloo backend takes: CPU only.
  C10dWork broadcast_several(const Tensors& tensors, const c10d::BroadcastOptions& opts);
  C10dWork all_reduce_several(const Tensors& tensors, const c10d::AllreduceOptions& opts);
  C10dWork all_gather_several(const TensorLists& outputs, const Tensors& inputs,
                              const c10d::AllgatherOptions& opts);
  C10dWork gather_each(Tensors& outputs, Tensors& inputs, c10d::OpType type,
                       const c10d::AllgatherOptions& opts);
  C10dWork reduce_scatter_each(Tensors& outputs, Tensors& inputs, c10d::OpType type,
                               const c10d::ReduceScatterOptions& opts);
  C10dWork wrap(c10d::OpType type, std::vector<WorkPtr> works, Tensors outputs);
  C10dWork wrap(WorkParts parts);
  CommPtr tagged_comm(c10::Device device);
  void check_pair(const P2POp& message) const;
  C10dWork point_to_point(const P2POp& message);
  C10dWork issue_message(const P2POp& message);
  C10dWork issue_batch(std::vector<P2POp> ops, WorkParts parts);
  void stage_batch(std::vector<P2POp>& ops, std::vector<CopyBack>& copies);

  const c10::intrusive_ptr<c10d::Store> store_;  // null over an existing communicator
  const CommPtr existing_comm_;                  // null unless the group wraps a communicator
  const c10::intrusive_ptr<BackendOptions> options_;
  // Also read by threads that create pairs.
  const std::shared_ptr<std::atomic<int64_t>> timeout_ms_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<uint64_t> monitored_barriers_{0};

  std::unique_ptr<PairComms> pairs_;  // null over an existing communicator

  mutable std::mutex mutex_;  // guards the next three; never held while a communicator is created
  Slots slots_;
  WorkPtr last_work_;
  bool closed_ = false;
  std::mutex creation_mutex_;  // serializes the creation of communicators

  std::atomic<std::thread::id> coalescing_thread_{};
  Coalescing coalescing_;  // accessed by that thread only

  // c10d splits once per device type and expects the same backend object for a custom backend.
  std::string last_split_name_;
  c10::weak_intrusive_ptr<c10d::Backend> last_split_;
};

}  // namespace torch_overlap
