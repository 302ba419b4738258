#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "torch_overlap/overlap/cuda/kernels.h"
#include "torch_overlap/overlap/device.h"
#include "torch_overlap/symm/cuda/device_wait_monitor.h"
#include "torch_overlap/symm/entry.h"

namespace torch_overlap::cuda {

// Transport through the memory of other GPUs that this one has mapped: by copy engines, or by the
// stores of a kernel.
//
// All flags are in device memory and hold epochs, so graph replays and eager calls may follow each
// other in any order that is the same on all ranks. A copy engine copies a chunk and then the
// epoch, from this rank's memory to the flag on the peer; copies on one stream arrive in order. A
// rank waits only for copies and kernels of other ranks, and these wait only for earlier operations
// of this rank. If all streams are one, a kernel copies the chunk and sets the flag.
class CudaTransport final : public Transport {
 public:
  CudaTransport(std::shared_ptr<SymmetricMemory> memory, PeerMappedOptions options);

  std::string_view name() const override { return options_.use_ce ? "copy engine" : "SM stores"; }
  bool is_peer_mapped() const override { return true; }
  void check() const override;
  void begin(const EntryPayload& entry) override;
  bool can_begin_on_comm_stream() const override { return true; }
  std::vector<std::shared_ptr<void>> retained_resources() const override {
    return {memory_, monitor_};
  }
  void exchange(OverlapStreams& streams, int stream, const Move& move) override;
  void wait_for_flags(OverlapStreams& streams, int stream, const std::vector<int>& flags) override;
  void post(OverlapStreams& streams, int stream, int flag) override;
  at::Tensor peer(int rank, int64_t at, c10::IntArrayRef sizes,
                  at::ScalarType dtype) const override;

  // Accessors for kernels that wait and signal by themselves.
  bool uses_copy_engine() const { return options_.use_ce; }
  const ChannelWords& words() const { return words_; }
  // Returns the address of byte `at` of `rank`'s data.
  void* data(int rank, int64_t at) const {
    return static_cast<std::byte*>(memory_->pointer(rank)) + at;
  }
  WaitControl control() const;
  uint32_t* flag(int rank, int flag) const { return word(rank, options_.layout.flag_offset(flag)); }
  uint32_t* busy() const { return word(memory_->rank(), options_.layout.busy_offset()); }
  // Return the first entry flag of a rank here, and the first of this rank's on every rank.
  const EntryFlag* entry_flags_from(int rank) const { return entries(memory_->rank(), rank); }
  PeerEntryFlags peer_entry_flags() const;
  PeerWords peer_abort_flags() const { return peer_words(options_.layout.abort_flag_offset()); }
  PeerWords peer_flags(int flag) const { return peer_words(options_.layout.flag_offset(flag)); }
  // Returns the tile flags on `rank` that `source` sets.
  uint32_t* tile_flags(int rank, int source) const {
    return word(rank, options_.layout.tile_flags_offset(source));
  }

 private:
  uint32_t* word(int rank, int64_t at) const { return static_cast<uint32_t*>(data(rank, at)); }
  PeerWords peer_words(int64_t at) const;
  EntryFlag* entries(int on, int of) const {
    return static_cast<EntryFlag*>(data(on, options_.layout.entry_flags_offset(of)));
  }
  cudaStream_t current_stream() const;

  const std::shared_ptr<SymmetricMemory> memory_;
  const PeerMappedOptions options_;
  const std::shared_ptr<DeviceWaitMonitor> monitor_;
  const ChannelWords words_;
  const int cluster_;
};

}  // namespace torch_overlap::cuda
