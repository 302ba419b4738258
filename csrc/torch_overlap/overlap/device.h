#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/overlap/fused.h"
#include "torch_overlap/overlap/low_latency.h"
#include "torch_overlap/overlap/streams.h"
#include "torch_overlap/overlap/transport.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {

class OverlapGroup;

// out = (parts[0] + parts[1] + ...) * scale_inv * factor + bias, in the order of the parts.
struct SumArgs {
  at::Tensor out;                   // [rows, columns], stride(1) == 1
  std::vector<at::Tensor> parts{};  // [rows, columns], stride(1) == 1, of one dtype
  at::Tensor scale_inv{};           // one fp32; undefined: 1
  double factor = 1;
  at::Tensor bias{};  // [columns]; undefined: 0
  int blocks = 0;     // CUDA: maximum number of blocks; 0: chosen by the kernel
  int cluster = 1;    // CUDA: number of blocks of a cluster
};

// Layout of a rank's part of a channel in symmetric memory:
//
//   data (bytes, rounded up) | epoch | flags[flags] | entry_flags[size]    128-byte lines
//   tile_flags[size][tiles]                                                one word each
//
// The epoch counts the operations of this rank. A flag holds the epoch of the operation whose chunk
// has arrived. entry_flags[r] holds the entry flags (symm/entry.h) of the last even and of the last
// odd operation that rank r has entered; it has finished all operations before the one that it
// entered last. The line of the epoch also has an abort flag, which a rank that gives up sets on
// all others, and a busy flag, which is set while a kernel runs that is an operation by itself.
// tile_flags[r] are the flags of tiles, or of slices of k, that arrive from rank r, for chunks that
// are sent that way.
struct ChannelLayout {
  static constexpr int64_t kLineBytes = 128;
  int64_t bytes = 0;
  int flags = 0;
  int size = 1;
  int tiles = 0;

  int64_t epoch_offset() const { return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes; }
  int64_t abort_flag_offset() const {
    return epoch_offset() + 2 * static_cast<int64_t>(sizeof(uint32_t));
  }
  int64_t busy_offset() const {
    return epoch_offset() + 3 * static_cast<int64_t>(sizeof(uint32_t));
  }
  int64_t flag_offset(int flag) const { return epoch_offset() + kLineBytes * (1 + flag); }
  int64_t entry_flags_offset(int rank) const { return flag_offset(flags) + kLineBytes * rank; }
  int64_t tile_flags_offset(int source) const {
    return entry_flags_offset(size) + static_cast<int64_t>(sizeof(uint32_t)) * tiles * source;
  }
  int64_t total() const { return tile_flags_offset(size); }
};

// Options of a transport over symmetric memory.
struct PeerMappedOptions {
  ChannelLayout layout;
  bool use_ce = false;
  int blocks = 16;
  int cluster = 1;
  std::shared_ptr<const OverlapGroup> group;
};

// Device-specific part of overlapped operations. Each kind of device has a folder (cpu/, cuda/) and
// registers itself, so the build decides which are available. Thread-safe.
class TORCH_OVERLAP_API OverlapDevice {
 public:
  virtual ~OverlapDevice() = default;

  virtual std::unique_ptr<OverlapStreams> make_streams(c10::Device device,
                                                       const StreamOptions& options) = 0;
  virtual std::unique_ptr<Transport> make_transport(std::shared_ptr<SymmetricMemory> memory,
                                                    const PeerMappedOptions& options) = 0;
  // Enqueues the sum on the current stream. 8- and 16-bit floats accumulate in fp32 and are rounded
  // once; fp32 and fp64 in their own type.
  virtual void sum(const SumArgs& args) = 0;
  // Fused kernels: GEMMs that communicate with other ranks themselves, over a peer-mapped transport
  // of this device. Returns why there is none for this shape; empty if there is one. The same on
  // all ranks.
  virtual std::string fused_unsupported_reason(const FusedShape& shape) {
    return concat("fused kernels need GPUs of sm_90, this is ", shape.device);
  }
  // Returns FusedGather::senders for this gather; the same on all ranks.
  virtual int num_gather_senders(const FusedGather& problem) const { return 0; }
  // Returns FusedReduceScatter::pieces for this scatter, at most `most`; the same on all ranks.
  virtual int num_reduce_scatter_pieces(const Transport& transport,
                                        const FusedReduceScatter& problem, int most) const {
    return 0;
  }
  // Returns the number of bytes of a channel that a fused GEMM and all-reduce needs; 0 if there is
  // no such kernel for this shape. The same on all ranks.
  virtual int64_t required_fused_allreduce_bytes(const FusedShape& shape) const { return 0; }
  // True if that kernel should be used when nothing was measured. `sms`: minimum SM count over the
  // ranks.
  virtual bool should_fuse_allreduce(const FusedShape& shape, int sms) const { return false; }
  // Enqueues the kernel on the current stream, within an operation. A FusedAllReduce, a
  // FusedReduceScatter without pieces and a FusedGather with senders enter the operation in the
  // kernel; Transport::begin() must not have been called for them.
  virtual void run_fused(Transport& transport, const FusedGather& problem);
  virtual void run_fused(Transport& transport, const FusedReduceScatter& problem);
  virtual void run_fused(Transport& transport, const FusedAllReduce& problem);
  // Collectives in one kernel, which enters the operation itself: Transport::begin() must not have
  // been called. has_kernel() is true if there is one, the same on all ranks; run_low_latency()
  // enqueues it on the current stream.
  virtual bool has_kernel(const LowLatencySum& sum) const { return false; }
  virtual bool has_kernel(const LowLatencyGather& gather) const { return false; }
  virtual void run_low_latency(Transport& transport, const LowLatencySum& sum);
  virtual void run_low_latency(Transport& transport, const LowLatencyGather& gather);
  // Returns the number of tile flags (ChannelLayout::tiles) that fused kernels need.
  virtual int tiles() const { return 0; }
  // Returns the vendor's name of the device. Devices of one name are assumed to be equally fast.
  virtual std::string name(c10::Device device) = 0;
  // Returns the number of SMs; 0 if the device has none.
  virtual int sm_count(c10::Device device) = 0;
  // For an operation on the current stream whose kernel occupies nearly the whole device while it
  // waits for other ranks: orders it after all earlier ones, of any group. The result must be held
  // until the kernel is enqueued; null: there is nothing to hold.
  virtual std::shared_ptr<void> acquire_resident_kernel_lock(c10::Device device) { return nullptr; }
  // Returns the id of the capture that the current stream is part of; 0 if it is not capturing.
  virtual uint64_t capture() = 0;
  // Makes the graph of that capture keep `what` alive.
  virtual void keep_for_graph(std::vector<std::shared_ptr<void>> what) = 0;
};

// Returns the device that was registered for the type before; null if there was none.
TORCH_OVERLAP_API std::shared_ptr<OverlapDevice> register_overlap_device(
    c10::DeviceType type, std::shared_ptr<OverlapDevice> device);
// Throws kUnsupported, naming `op`, if there is none.
TORCH_OVERLAP_API OverlapDevice& overlap_device(std::string_view op, c10::DeviceType type);

struct TORCH_OVERLAP_API OverlapDeviceRegistration {
  OverlapDeviceRegistration(c10::DeviceType type, std::shared_ptr<OverlapDevice> device) {
    register_overlap_device(type, std::move(device));
  }
};

}  // namespace torch_overlap
