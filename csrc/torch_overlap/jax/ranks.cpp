#include "torch_overlap/jax/ranks.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/shutdown.h"
#include "torch_overlap/jax/stream.h"
#include "torch_overlap/overlap/registry.h"

namespace torch_overlap::jax {
namespace {

struct Axis {
  int size = 1;
  std::map<int, DeviceRank> by_ordinal;
};

struct BufferOfAxis {
  int64_t axis = 0;
  std::map<int, int64_t> core_ids;  // by ordinal
  int64_t holds = 1;
};

struct Ranks {
  ForkSafeMutex mutex;
  std::map<int64_t, Axis> axes;
  std::map<int64_t, BufferOfAxis> buffers;
  std::map<int64_t, int64_t> call_counts;  // by domain
  int64_t last_axis = 0;
  int64_t last_buffer = 0;
};

Ranks& ranks() { return LeakySingleton<Ranks>::get(); }

// Calls `body(i)` for i < count, concurrently if there are several: each waits for the others.
// Throws the first error after all have ended.
void for_each_device(size_t count, const std::function<void(size_t)>& body) {
  if (count == 1) return body(0);
  std::vector<std::exception_ptr> errors(count);
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      try {
        body(i);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

std::string joined(const std::map<int, DeviceRank>& by_ordinal) {
  std::vector<int> ordinals;
  for (const auto& [ordinal, rank] : by_ordinal) ordinals.push_back(ordinal);
  return list_string(ordinals);
}

// The lock must be held.
Axis& require_axis(std::string_view op, int64_t axis) {
  const auto found = ranks().axes.find(axis);
  TORCH_OVERLAP_CHECK(
      found != ranks().axes.end(), kValue, op, ": expected axis to be the id of a mesh axis, got ",
      axis, axis > 0 && axis <= ranks().last_axis ? ", which was closed" : "",
      ". Call torch_overlap.jax.bootstrap(mesh, axis) first, and trace the program again.");
  return found->second;
}

const DeviceRank& rank_on(std::string_view op, const Axis& axis, int ordinal) {
  // A process with one device on the axis has one rank, under whatever number XLA gives the device.
  if (axis.by_ordinal.size() == 1) return axis.by_ordinal.begin()->second;
  const auto found = axis.by_ordinal.find(ordinal);
  TORCH_OVERLAP_CHECK(found != axis.by_ordinal.end(), kValue, op,
                      ": expected a device of the mesh (ordinals ", joined(axis.by_ordinal),
                      "), got device ordinal ", ordinal,
                      ". Run the program on the mesh of bootstrap().");
  return found->second;
}

std::shared_ptr<TorchComm> make_comm(const AxisOptions& options, const LocalDevice& device,
                                     const c10::intrusive_ptr<c10d::Store>& store) {
  CommOptions comm_options;
  comm_options.timeout = options.timeout;
  comm_options.store = store;
  // A failure reaches Python as XLA's error of the program.
  comm_options.abort_process_on_timeout_or_error = false;
  const bool has_index = options.device_type != c10::kCPU;
  const c10::Device on(options.device_type,
                       static_cast<c10::DeviceIndex>(has_index ? device.ordinal : -1));
  return TorchComm::create(options.backend, on, concat(options.name, ".", device.group),
                           comm_options, RankAndSize{device.rank, options.size});
}

// Finalizes the ranks' communicators. `timeout`: replaces theirs.
void end_ranks(std::vector<DeviceRank> ended, std::optional<Milliseconds> timeout) {
  for_each_device(ended.size(), [&](size_t i) {
    TorchComm& comm = *ended[i].comm;
    try {
      if (timeout && !comm.is_aborted()) comm.set_timeout(*timeout);
      ended[i].executor.reset();
      if (!comm.is_finalized() && !comm.is_aborted()) comm.finalize();
    } catch (const std::exception&) {
      comm.abort();
      throw;
    }
  });
}

// Moves the ranks out of an axis.
std::vector<DeviceRank> take_ranks(Axis& axis) {
  std::vector<DeviceRank> all;
  for (auto& [ordinal, rank] : axis.by_ordinal) all.push_back(std::move(rank));
  axis.by_ordinal.clear();
  return all;
}

}  // namespace

int64_t add_axis(const AxisOptions& options) {
  constexpr std::string_view kOp = "bootstrap";
  TORCH_OVERLAP_CHECK(!options.devices.empty(), kValue, kOp,
                      ": expected a device of this process in the mesh, got none. Include one of "
                      "jax.local_devices().");
  const bool is_one_process = !options.store;
  TORCH_OVERLAP_CHECK(is_one_process || options.devices.size() == 1, kUnsupported, kOp,
                      ": expected one device in each of several processes, got ",
                      options.devices.size(),
                      ". Start a process per device, or put all devices into one process.");
  TORCH_OVERLAP_CHECK(options.devices.size() == 1 || options.device_type == c10::kCPU, kUnsupported,
                      kOp, ": expected one GPU per process, got ", options.devices.size(),
                      ". Start a process per GPU with jax.distributed.initialize().");
  auto store = options.store;
  if (is_one_process) store = c10::make_intrusive<c10d::HashStore>();
  std::vector<DeviceRank> made(options.devices.size());
  for_each_device(made.size(), [&](size_t i) {
    prepare_device(options.device_type);
    made[i].comm = make_comm(options, options.devices[i], store);
    if (options.device_type == c10::kCPU) {
      made[i].executor = std::make_shared<OrderedExecutor>(made[i].comm);
    }
  });
  [[maybe_unused]] static const bool ends_at_exit = [] {
    at_process_exit([] { remove_all_axes(); });
    return true;
  }();
  const std::lock_guard lock(ranks().mutex);
  const int64_t id = ++ranks().last_axis;
  Axis& axis = ranks().axes[id];
  axis.size = options.size;
  for (size_t i = 0; i < made.size(); ++i) {
    axis.by_ordinal[options.devices[i].ordinal] = std::move(made[i]);
  }
  return id;
}

void remove_axis(int64_t axis) {
  std::vector<DeviceRank> ended;
  std::vector<int64_t> buffers;
  {
    const std::lock_guard lock(ranks().mutex);
    ended = take_ranks(require_axis("close", axis));
    ranks().axes.erase(axis);
    std::erase_if(ranks().buffers, [&](const auto& item) {
      if (item.second.axis != axis) return false;
      for (const auto& [ordinal, core_id] : item.second.core_ids) buffers.push_back(core_id);
      return true;
    });
  }
  for (const int64_t id : buffers) destroy_comm_overlap_buffer(id);
  end_ranks(std::move(ended), std::nullopt);
}

void remove_all_axes() noexcept {
  constexpr Milliseconds kExitTimeout{10'000};
  std::map<int64_t, Axis> axes;
  try {
    destroy_all_buffers();
    const std::lock_guard lock(ranks().mutex);
    axes.swap(ranks().axes);
  } catch (const std::exception&) {
    return;  // the process ends
  }
  for (auto& [id, axis] : axes) {
    try {
      end_ranks(take_ranks(axis), kExitTimeout);
    } catch (const std::exception&) {
      continue;  // aborted: another rank ended without finalize
    }
  }
}

DeviceRank find_rank(std::string_view op, int64_t axis, int ordinal) {
  const std::lock_guard lock(ranks().mutex);
  return rank_on(op, require_axis(op, axis), ordinal);
}

int64_t create_buffer(int64_t axis, const CommOverlapConfig& config) {
  std::vector<std::pair<int, DeviceRank>> devices;
  {
    const std::lock_guard lock(ranks().mutex);
    const Axis& of = require_axis("create_comm_overlap_buffer", axis);
    devices.assign(of.by_ordinal.begin(), of.by_ordinal.end());
  }
  std::vector<int64_t> made(devices.size());
  for_each_device(made.size(), [&](size_t i) {
    made[i] = create_comm_overlap_buffer(devices[i].second.comm, config);
  });
  std::map<int, int64_t> core_ids;
  for (size_t i = 0; i < made.size(); ++i) core_ids[devices[i].first] = made[i];
  const std::lock_guard lock(ranks().mutex);
  for (auto& [id, buffer] : ranks().buffers) {
    if (buffer.axis != axis || buffer.core_ids != core_ids) continue;
    ++buffer.holds;
    return id;
  }
  const int64_t id = ++ranks().last_buffer;
  ranks().buffers[id] = {.axis = axis, .core_ids = std::move(core_ids)};
  return id;
}

void destroy_buffer(int64_t id) {
  std::vector<int64_t> core_ids;
  {
    const std::lock_guard lock(ranks().mutex);
    const auto found = ranks().buffers.find(id);
    TORCH_OVERLAP_CHECK(found != ranks().buffers.end(), kValue,
                        "destroy_comm_overlap_buffer: expected the id of a live buffer, got ", id,
                        id > 0 && id <= ranks().last_buffer ? ", which was destroyed"
                                                            : ", which no buffer ever had",
                        ". Pass what create_comm_overlap_buffer() returned.");
    for (const auto& [ordinal, core_id] : found->second.core_ids) core_ids.push_back(core_id);
    if (--found->second.holds == 0) ranks().buffers.erase(found);
  }
  for (const int64_t core_id : core_ids) destroy_comm_overlap_buffer(core_id);
}

void destroy_all_buffers() {
  std::map<int64_t, BufferOfAxis> all;
  {
    const std::lock_guard lock(ranks().mutex);
    all.swap(ranks().buffers);
  }
  for (const auto& [id, buffer] : all) {
    for (const auto& [ordinal, core_id] : buffer.core_ids) {
      for (int64_t hold = 0; hold < buffer.holds; ++hold) destroy_comm_overlap_buffer(core_id);
    }
  }
}

DeviceBuffer find_buffer(std::string_view op, int64_t id, int ordinal) {
  const std::lock_guard lock(ranks().mutex);
  const auto found = ranks().buffers.find(id);
  TORCH_OVERLAP_CHECK(found != ranks().buffers.end(), kValue, op,
                      ": expected comm_overlap_id to be the id of a live buffer, got ", id,
                      id > 0 && id <= ranks().last_buffer
                          ? ", which was destroyed"
                          : "; make one with create_comm_overlap_buffer()");
  const BufferOfAxis& buffer = found->second;
  const auto& ids = buffer.core_ids;
  const auto& rank = rank_on(op, require_axis(op, buffer.axis), ordinal);
  return {rank, ids.size() == 1 ? ids.begin()->second : ids.at(ordinal)};
}

CallSite next_call_site(int64_t domain) {
  const std::lock_guard lock(ranks().mutex);
  return {domain, ranks().call_counts[domain]++};
}

int64_t CreateCommOverlapBuffer(CommOverlapType comm_type, CommOverlapMethod method,
                                const std::vector<size_t>& buffer_shape,
                                c10::ScalarType buffer_dtype, int tp_size, int num_splits,
                                int num_max_streams, int comm_cga_size, int gemm_priority,
                                int comm_priority, int num_comm_sm, int set_sm_margin, bool use_ce,
                                bool atomic_gemm, bool rs_overlap_first_gemm, bool aggregate_ag,
                                int64_t axis) {
  if (axis == 0) {
    const std::lock_guard lock(ranks().mutex);
    int64_t num_fitting = 0;
    for (const auto& [id, one] : ranks().axes) {
      if (one.size != tp_size) continue;
      axis = id;
      ++num_fitting;
    }
    TORCH_OVERLAP_CHECK(num_fitting == 1, kValue,
                        "CreateCommOverlapBuffer: expected one mesh axis of tp_size ", tp_size,
                        " ranks, got ", num_fitting, ". Pass the id of the axis.");
  }
  return create_buffer(axis, {.comm_type = comm_type,
                              .method = method,
                              .buffer_shape = {buffer_shape.begin(), buffer_shape.end()},
                              .buffer_dtype = buffer_dtype,
                              .tp_size = tp_size,
                              .num_splits = num_splits,
                              .num_max_streams = num_max_streams,
                              .comm_cga_size = comm_cga_size,
                              .gemm_priority = gemm_priority,
                              .comm_priority = comm_priority,
                              .num_comm_sm = num_comm_sm,
                              .set_sm_margin = set_sm_margin != 0,
                              .use_ce = use_ce,
                              .atomic_gemm = atomic_gemm,
                              .rs_overlap_first_gemm = rs_overlap_first_gemm,
                              .aggregate_ag = aggregate_ag});
}

void DestroyCommOverlapBuffer(size_t unique_id) { destroy_buffer(static_cast<int64_t>(unique_id)); }

void DestroyAllCommOverlapBuffers() { destroy_all_buffers(); }

}  // namespace torch_overlap::jax
