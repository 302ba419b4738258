#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/jax/ordered_executor.h"
#include "torch_overlap/overlap/comm_overlap.h"

// The ranks of the process's devices: a mesh axis is one id in a compiled program, and each device
// that runs the program finds its own communicator and buffers by its ordinal. Thread-safe.
namespace torch_overlap::jax {

// A device of this process on a mesh axis.
struct DeviceRank {
  std::shared_ptr<TorchComm> comm;
  // Null on GPUs, whose streams keep the order.
  std::shared_ptr<OrderedExecutor> executor;
};

// A device of this process and its place on a mesh axis. `group` numbers the sets of devices that
// differ in their position on that axis alone.
struct LocalDevice {
  int ordinal = 0;
  int rank = 0;
  int group = 0;
};

struct AxisOptions {
  std::string name;
  std::string backend;
  c10::DeviceType device_type = c10::kCPU;
  int size = 1;
  std::vector<LocalDevice> devices;
  std::optional<Milliseconds> timeout;
  // Null: the ranks are all in this process.
  c10::intrusive_ptr<c10d::Store> store;
};

// Makes the communicators of the process's devices on a mesh axis. Collective over the processes.
// Returns the id of the axis: 1, 2, ... in the order of the calls.
TORCH_OVERLAP_API int64_t add_axis(const AxisOptions& options);
// Finalizes the communicators of an axis and destroys its buffers. Collective.
TORCH_OVERLAP_API void remove_axis(int64_t axis);
// Ends what is left at the end of the process. Waits some seconds for ranks that do not answer.
TORCH_OVERLAP_API void remove_all_axes() noexcept;

// Throws kValue, naming `op`, if there is no such axis, or no rank of it on the device.
TORCH_OVERLAP_API DeviceRank find_rank(std::string_view op, int64_t axis, int ordinal);

// Creates a communication buffer on every device of the axis. Collective. Returns an id that is
// equal on all processes. Equal parameters give the id of the existing buffer, whose reference
// count is incremented.
TORCH_OVERLAP_API int64_t create_buffer(int64_t axis, const CommOverlapConfig& config);
TORCH_OVERLAP_API void destroy_buffer(int64_t id);
TORCH_OVERLAP_API void destroy_all_buffers();

// A buffer on one device: its rank, and its id in the core (overlap/registry.h).
struct DeviceBuffer {
  DeviceRank rank;
  int64_t core_id = 0;
};
TORCH_OVERLAP_API DeviceBuffer find_buffer(std::string_view op, int64_t id, int ordinal);

// Returns the site of the next custom call of a program that is being compiled.
CallSite next_call_site(int64_t domain);

// Transformer Engine's functions of these names, for the devices of an axis. `axis` 0 is the only
// axis that has `tp_size` ranks.
TORCH_OVERLAP_API int64_t CreateCommOverlapBuffer(
    CommOverlapType comm_type, CommOverlapMethod method, const std::vector<size_t>& buffer_shape,
    c10::ScalarType buffer_dtype, int tp_size, int num_splits, int num_max_streams,
    int comm_cga_size, int gemm_priority, int comm_priority, int num_comm_sm, int set_sm_margin,
    bool use_ce, bool atomic_gemm, bool rs_overlap_first_gemm, bool aggregate_ag, int64_t axis = 0);
TORCH_OVERLAP_API void DestroyCommOverlapBuffer(size_t unique_id);
TORCH_OVERLAP_API void DestroyAllCommOverlapBuffers();

}  // namespace torch_overlap::jax
