#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "torch_overlap/overlap/cuda/kernels.h"
#include "torch_overlap/overlap/device.h"
#include "torch_overlap/symm/cuda/wait_board.h"
#include "torch_overlap/symm/entry.h"

namespace torch_overlap::cuda {

// Through memory of other GPUs that this one reaches: by copy engines, or by the stores of a
// kernel.
//
// All words live in device memory and hold epochs, so replays of graphs and eager calls may follow
// each other in any order that is the same on all ranks. A copy engine copies a chunk and behind it
// the word of the epoch, from this rank's memory to the flag in the other's: on one stream they
// arrive in this order. What is waited for comes from copies and kernels of other ranks that wait
// for nothing of this one but what came before in the order of the operations. Of lanes that are
// one a kernel does both.
class CudaTransport final : public Transport {
 public:
  CudaTransport(std::shared_ptr<SymmetricMemory> memory, DirectOptions options);

  std::string_view name() const override { return options_.use_ce ? "copy engine" : "SM stores"; }
  bool is_direct() const override { return true; }
  void check() const override;
  void begin(const Begin& operation) override;
  bool may_begin_beside() const override { return true; }
  std::vector<std::shared_ptr<void>> keepers() const override { return {memory_, board_}; }
  void exchange(Lanes& lanes, int lane, const Move& move) override;
  void arrived(Lanes& lanes, int lane, const std::vector<int>& flags) override;
  void post(Lanes& lanes, int lane, int flag) override;
  at::Tensor peer(int rank, int64_t at, c10::IntArrayRef sizes,
                  at::ScalarType dtype) const override;

  // For kernels that wait and tell by themselves.
  bool uses_copy_engine() const { return options_.use_ce; }
  const ChannelWords& words() const { return words_; }
  // Byte `at` of the data of `rank`'s part.
  void* data(int rank, int64_t at) const {
    return static_cast<std::byte*>(memory_->pointer(rank)) + at;
  }
  WaitControl control() const;
  uint32_t* flag(int rank, int flag) const { return word(rank, options_.layout.flag_at(flag)); }
  uint32_t* busy() const { return word(memory_->rank(), options_.layout.busy_at()); }
  // The first of the entries of a rank here, and on every rank of those of this one.
  const BegunEntry* begun_by(int rank) const { return entries(memory_->rank(), rank); }
  BegunEntriesOfAll begun_of_all() const;
  WordOfAll gone_of_all() const { return word_of_all(options_.layout.gone_at()); }
  WordOfAll flag_of_all(int flag) const { return word_of_all(options_.layout.flag_at(flag)); }
  // On `rank`, the words of tiles that come from `source`.
  uint32_t* tile_word(int rank, int source) const {
    return word(rank, options_.layout.tiles_at(source));
  }

 private:
  uint32_t* word(int rank, int64_t at) const { return static_cast<uint32_t*>(data(rank, at)); }
  WordOfAll word_of_all(int64_t at) const;
  BegunEntry* entries(int on, int of) const {
    return static_cast<BegunEntry*>(data(on, options_.layout.begun_at(of)));
  }
  cudaStream_t current_stream() const;

  const std::shared_ptr<SymmetricMemory> memory_;
  const DirectOptions options_;
  const std::shared_ptr<WaitBoard> board_;
  const ChannelWords words_;
  const int cluster_;
};

}  // namespace torch_overlap::cuda
