#include "torch_overlap/overlap/cuda/transport.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "torch_overlap/comm/backends/nccl/backend.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/overlap/channel.h"
#include "torch_overlap/overlap/cuda/fused_host.h"

namespace torch_overlap::cuda {
namespace {

void require(cudaError_t status, std::string_view what) { cuda::check(status, what); }

// Returns the communicator's monitor, so that its watchdog sees expired waits; otherwise a new one.
std::shared_ptr<DeviceWaitMonitor> monitor_of(const OverlapGroup& group) {
  if (const auto comm = group.comm()) {
    const auto backend = std::dynamic_pointer_cast<NcclBackend>(comm->membership()->backend);
    if (backend) return backend->wait_monitor();
  }
  return std::make_shared<DeviceWaitMonitor>(group.device().index());
}

}  // namespace

CudaTransport::CudaTransport(std::shared_ptr<SymmetricMemory> memory, PeerMappedOptions options)
    : memory_(std::move(memory)),
      options_(std::move(options)),
      monitor_(monitor_of(*options_.group)),
      words_{.epoch = word(memory_->rank(), options_.layout.epoch_offset()),
             .ticket = word(memory_->rank(), options_.layout.epoch_offset()) + 1,
             .abort_flag = word(memory_->rank(), options_.layout.abort_flag_offset()),
             .id = memory_->id(),
             .rank = memory_->rank(),
             .size = memory_->size()},
      cluster_(at::cuda::getDeviceProperties(memory_->device().index())->major >= 9
                   ? options_.cluster
                   : 1) {
  TORCH_OVERLAP_CHECK(memory_->size() <= kMaxRanks, kUnsupported, memory_->name(),
                      ": expected at most ", kMaxRanks, " ranks that share memory, got ",
                      memory_->size());
  const c10::cuda::CUDAGuard guard(memory_->device());
  const RelaxedCapture relaxed;
  require(load_overlap_kernels(), "overlap: loading kernels");
  load_fused_kernels();
}

cudaStream_t CudaTransport::current_stream() const {
  return c10::cuda::getCurrentCUDAStream(memory_->device().index()).stream();
}

WaitControl CudaTransport::control() const {
  return monitor_->control(memory_->id(), memory_->name(), options_.group->timeout());
}

PeerWords CudaTransport::peer_words(int64_t at) const {
  PeerWords words{};
  for (int rank = 0; rank < memory_->size(); ++rank) words.at[rank] = word(rank, at);
  return words;
}

PeerEntryFlags CudaTransport::peer_entry_flags() const {
  PeerEntryFlags all{};
  for (int rank = 0; rank < memory_->size(); ++rank) all.at[rank] = entries(rank, memory_->rank());
  return all;
}

void CudaTransport::check() const {
  if (const auto expired = monitor_->expired()) throw Error(ErrorKind::kTimeout, *expired);
}

void CudaTransport::begin(const EntryPayload& entry) {
  require(launch_begin(words_, peer_entry_flags(), peer_abort_flags(), entry_flags_from(0),
                       entry.word(), control(), current_stream()),
          "overlap: begin");
}

void CudaTransport::exchange(OverlapStreams& streams, int stream, const Move& move) {
  streams.run(stream, "exchange", [&] {
    const cudaStream_t current = current_stream();
    const size_t bytes = move.send.nbytes();
    const void* const from = bytes == 0 ? nullptr : move.send.const_data_ptr();
    void* const to = data(move.dst, move.dst_offset_bytes);
    // With one stream nothing overlaps with a copy, and one launch costs the host less than two
    // copies.
    const bool by_kernel = !options_.use_ce || streams.is_single_stream();
    if (by_kernel && move.dst_pitch_bytes == 0 && move.flag != kNoFlag) {
      require(launch_copy_signal(words_, to, from, bytes,
                                 word(move.dst, options_.layout.flag_offset(move.flag)), control(),
                                 options_.blocks, cluster_, current),
              "overlap: copy and signal");
      return;
    }
    if (bytes > 0 && move.dst_pitch_bytes > 0) {
      const size_t element = move.send.element_size();
      require(cudaMemcpy2DAsync(to, move.dst_pitch_bytes, from, move.send.stride(0) * element,
                                move.send.size(1) * element, move.send.size(0),
                                cudaMemcpyDeviceToDevice, current),
              "cudaMemcpy2DAsync to a peer");
    } else if (bytes > 0) {
      require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, current),
              "cudaMemcpyAsync to a peer");
    }
    if (move.flag == kNoFlag) return;
    require(cudaMemcpyAsync(word(move.dst, options_.layout.flag_offset(move.flag)), words_.epoch,
                            sizeof(uint32_t), cudaMemcpyDeviceToDevice, current),
            "cudaMemcpyAsync of a flag");
  });
}

void CudaTransport::wait_for_flags(OverlapStreams& streams, int stream,
                                   const std::vector<int>& flags) {
  streams.run(stream, "await", [&] {
    FlagList list{};
    for (const int flag : flags) {
      list.at[list.count] = word(memory_->rank(), options_.layout.flag_offset(flag));
      list.source[list.count++] = flag % memory_->size();
    }
    require(launch_await(words_, list, control(), current_stream()), "overlap: await");
  });
}

void CudaTransport::post(OverlapStreams& streams, int stream, int flag) {
  streams.run(stream, "post", [&] {
    require(launch_signal_flags(words_, peer_flags(flag + memory_->rank()), control(),
                                current_stream()),
            "overlap: post");
  });
}

at::Tensor CudaTransport::peer(int rank, int64_t at, c10::IntArrayRef sizes,
                               at::ScalarType dtype) const {
  return memory_->view(rank, sizes, dtype, at);
}

}  // namespace torch_overlap::cuda
