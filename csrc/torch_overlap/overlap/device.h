#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/overlap/direct.h"
#include "torch_overlap/overlap/fused.h"
#include "torch_overlap/overlap/lanes.h"
#include "torch_overlap/overlap/transport.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {

class OverlapGroup;

// out = (parts[0] + parts[1] + ...) * scale_inv * factor + bias, in the order of the parts.
struct SumArgs {
  at::Tensor out;                 // [rows, columns], stride(1) == 1
  std::vector<at::Tensor> parts;  // [rows, columns], stride(1) == 1, of one dtype
  at::Tensor scale_inv;           // one fp32; undefined: 1
  double factor = 1;
  at::Tensor bias;  // [columns]; undefined: 0
  int blocks = 0;   // CUDA: how many may work at it; 0: as many as are good
  int cluster = 1;  // CUDA: of how many blocks
};

// How a part of a channel lies in symmetric memory:
//
//   data (bytes, rounded up) | epoch | flags[flags] | begun[size]       a line of 128 bytes each
//   tiles[size][tiles]                                                  a word each
//
// The epoch counts the operations of this rank; a flag holds the epoch of the operation whose chunk
// is there. begun[r] has the entries (symm/entry.h) of the last even and of the last odd operation
// that rank r has begun: it has left behind those before. The line of the epoch also has a word
// that a rank which gives up sets on all others, and one that says that a kernel runs which is an
// operation by itself. tiles[r] are the flags of tiles, or slices of k, that come from rank r,
// where a chunk comes so.
struct ChannelLayout {
  static constexpr int64_t kLine = 128;
  int64_t bytes = 0;
  int flags = 0;
  int size = 1;
  int tiles = 0;

  int64_t epoch_at() const { return (bytes + kLine - 1) / kLine * kLine; }
  int64_t gone_at() const { return epoch_at() + 2 * static_cast<int64_t>(sizeof(uint32_t)); }
  int64_t busy_at() const { return epoch_at() + 3 * static_cast<int64_t>(sizeof(uint32_t)); }
  int64_t flag_at(int flag) const { return epoch_at() + kLine * (1 + flag); }
  int64_t begun_at(int rank) const { return flag_at(flags) + kLine * rank; }
  int64_t tiles_at(int source) const {
    return begun_at(size) + static_cast<int64_t>(sizeof(uint32_t)) * tiles * source;
  }
  int64_t total() const { return tiles_at(size); }
};

// What a transport over symmetric memory needs to know.
struct DirectOptions {
  ChannelLayout layout;
  bool use_ce = false;
  int blocks = 16;
  int cluster = 1;
  std::shared_ptr<const OverlapGroup> group;
};

// What an overlapped operation needs of one kind of device. A folder a kind (cpu/, cuda/), which
// registers itself: what is built decides what there is. Threads: any.
class TORCH_OVERLAP_API OverlapDevice {
 public:
  virtual ~OverlapDevice() = default;

  virtual std::unique_ptr<Lanes> make_lanes(c10::Device device, const LaneOptions& options) = 0;
  virtual std::unique_ptr<Transport> make_transport(std::shared_ptr<SymmetricMemory> memory,
                                                    const DirectOptions& options) = 0;
  // On the current stream. 8- and 16-bit floats accumulate in fp32 and are rounded once; fp32 and
  // fp64 in their own type.
  virtual void sum(const SumArgs& args) = 0;
  // Products that talk to other ranks by themselves, through a direct transport of this device. Why
  // there are none for such a product; empty: there are. The same on all ranks.
  virtual std::string fused_obstacle(const FusedShape& shape) {
    return concat("fused kernels need GPUs of sm_90, this is ", shape.device);
  }
  // FusedGather::senders of such a gather; the same on all ranks.
  virtual int gather_senders(const FusedGather& problem) const { return 0; }
  // FusedScatter::pieces of such a scatter, at most so many; the same on all ranks.
  virtual int scatter_pieces(const Transport& transport, const FusedScatter& problem,
                             int most) const {
    return 0;
  }
  // How many bytes of a channel a product and all-reduce in one kernel needs; 0: there is none for
  // such a product. The same on all ranks.
  virtual int64_t reduce_room(const FusedShape& shape) const { return 0; }
  // Whether it is to be taken where nothing was measured, by ranks that have so many SMs at least.
  virtual bool reduce_pays(const FusedShape& shape, int sms) const { return false; }
  // On the current stream, within an operation; that of a FusedReduce, of a FusedScatter without
  // pieces, and of a FusedGather with senders, nobody has begun.
  virtual void run_fused(Transport& transport, const FusedGather& problem);
  virtual void run_fused(Transport& transport, const FusedScatter& problem);
  virtual void run_fused(Transport& transport, const FusedReduce& problem);
  // Collectives in one kernel, within an operation that nobody has begun: the kernel does. Whether
  // there is one, the same on all ranks; and what puts it on the current stream.
  virtual bool has_kernel(const DirectSum& sum) const { return false; }
  virtual bool has_kernel(const DirectGather& gather) const { return false; }
  virtual void run_direct(Transport& transport, const DirectSum& sum);
  virtual void run_direct(Transport& transport, const DirectGather& gather);
  // Of ChannelLayout, that fused kernels need.
  virtual int tiles() const { return 0; }
  // As its maker calls it; devices of one name are as fast as each other.
  virtual std::string name(c10::Device device) = 0;
  // 0 where there is no such thing.
  virtual int sm_count(c10::Device device) = 0;
  // Before an operation on the current stream whose kernel leaves others next to nothing of the
  // device while it waits for other ranks: it comes behind those before, of any group. Held until
  // it is issued; null: there is nothing to hold.
  virtual std::shared_ptr<void> take_turn(c10::Device device) { return nullptr; }
  // The capture that the current stream is part of; 0: none is.
  virtual uint64_t capture() = 0;
  // Lets the graph of that capture keep what it needs.
  virtual void keep_for_graph(std::vector<std::shared_ptr<void>> what) = 0;
};

TORCH_OVERLAP_API void register_overlap_device(c10::DeviceType type,
                                               std::shared_ptr<OverlapDevice> device);
// Throws kUnsupported, naming `op`, where there is none.
TORCH_OVERLAP_API OverlapDevice& overlap_device(std::string_view op, c10::DeviceType type);

struct TORCH_OVERLAP_API OverlapDeviceRegistration {
  OverlapDeviceRegistration(c10::DeviceType type, std::shared_ptr<OverlapDevice> device) {
    register_overlap_device(type, std::move(device));
  }
};

}  // namespace torch_overlap
