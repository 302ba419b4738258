#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/comm/shutdown.h"
#include "torch_overlap/jax/ffi.h"
#include "torch_overlap/jax/ranks.h"
#include "torch_overlap/jax/tensors.h"

// The functions that torch_overlap.jax calls through ctypes. Each returns -1 if it failed; then
// torch_overlap_jax_error() is the text of the error, and torch_overlap_jax_error_kind() its
// ErrorKind.
namespace torch_overlap::jax {
namespace {

struct LastError {
  std::string text;
  ErrorKind kind = ErrorKind::kRuntime;
};
thread_local LastError last_error;

struct Stores {
  ForkSafeMutex mutex;
  std::map<int64_t, c10::intrusive_ptr<c10d::Store>> by_id;
  // Served by this process. Kept, because other processes may use one longer than this process.
  std::vector<c10::intrusive_ptr<c10d::Store>> served;
  int64_t last = 0;
};

Stores& stores() { return LeakySingleton<Stores>::get(); }

int64_t keep_store(c10::intrusive_ptr<c10d::Store> store) {
  const std::lock_guard lock(stores().mutex);
  stores().by_id[++stores().last] = std::move(store);
  return stores().last;
}

void keep_served(c10::intrusive_ptr<c10d::Store> store) {
  const std::lock_guard lock(stores().mutex);
  stores().served.push_back(std::move(store));
}

c10::intrusive_ptr<c10d::Store> find_store(int64_t id) {
  const std::lock_guard lock(stores().mutex);
  const auto found = stores().by_id.find(id);
  TORCH_OVERLAP_CHECK(found != stores().by_id.end(), kValue,
                      "bootstrap: expected the id of a store, got ", id,
                      ". Call torch_overlap.jax.bootstrap().");
  return found->second;
}

c10::intrusive_ptr<c10d::Store> take_store(int64_t id) {
  auto store = find_store(id);
  const std::lock_guard lock(stores().mutex);
  stores().by_id.erase(id);
  return store;
}

template <typename Body>
int64_t returning(const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    last_error = {error.what(), error.kind()};
  } catch (const c10::Error& error) {
    last_error = {error.what_without_backtrace(), ErrorKind::kRuntime};
  } catch (const std::exception& error) {
    last_error = {error.what(), ErrorKind::kRuntime};
  }
  return -1;
}

}  // namespace
}  // namespace torch_overlap::jax

namespace jax = torch_overlap::jax;

extern "C" {

TORCH_OVERLAP_API const char* torch_overlap_jax_error() { return jax::last_error.text.c_str(); }

TORCH_OVERLAP_API int torch_overlap_jax_error_kind() {
  return static_cast<int>(jax::last_error.kind);
}

// Version of XLA's FFI that this library was compiled for: major * 1000 + minor.
TORCH_OVERLAP_API int torch_overlap_jax_ffi_version() {
  return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR;
}

// Opens a TCP store: serves it at a free port if `port` is 0. Returns its id.
TORCH_OVERLAP_API int64_t torch_overlap_jax_tcp_store(const char* host, int port,
                                                      int64_t timeout_ms) {
  return jax::returning([&] {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.isServer = port == 0;
    options.waitWorkers = false;
    options.timeout = torch_overlap::Milliseconds(timeout_ms);
    auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
    if (options.isServer) jax::keep_served(store);
    return jax::keep_store(std::move(store));
  });
}

TORCH_OVERLAP_API int64_t torch_overlap_jax_file_store(const char* path, int num_ranks,
                                                       int64_t timeout_ms) {
  return jax::returning([&] {
    auto store = c10::make_intrusive<c10d::FileStore>(path, num_ranks);
    store->setTimeout(torch_overlap::Milliseconds(timeout_ms));
    return jax::keep_store(std::move(store));
  });
}

// Returns the port of a TCP store.
TORCH_OVERLAP_API int64_t torch_overlap_jax_store_port(int64_t store) {
  return jax::returning([&]() -> int64_t {
    const auto found = c10::dynamic_intrusive_pointer_cast<c10d::TCPStore>(jax::find_store(store));
    TORCH_OVERLAP_CHECK(found, kValue, "bootstrap: expected a TCP store, got another one. Pass ",
                        "tcp://host:port.");
    return found->getPort();
  });
}

// `store` 0: the ranks are all in this process. `timeout_ms` 0: the default.
TORCH_OVERLAP_API int64_t torch_overlap_jax_add_axis(const char* name, const char* backend,
                                                     int is_cuda, int size, int num_devices,
                                                     const int32_t* ordinals, const int32_t* ranks,
                                                     const int32_t* groups, int64_t store,
                                                     int64_t timeout_ms) {
  return jax::returning([&] {
    jax::AxisOptions options{.name = name,
                             .backend = backend,
                             .device_type = is_cuda != 0 ? c10::kCUDA : c10::kCPU,
                             .size = size,
                             .devices = {},
                             .timeout = std::nullopt,
                             .store = nullptr};
    for (int i = 0; i < num_devices; ++i) {
      options.devices.push_back({.ordinal = ordinals[i], .rank = ranks[i], .group = groups[i]});
    }
    if (timeout_ms > 0) options.timeout = torch_overlap::Milliseconds(timeout_ms);
    if (store != 0) options.store = jax::take_store(store);
    return jax::add_axis(options);
  });
}

TORCH_OVERLAP_API int64_t torch_overlap_jax_remove_axis(int64_t axis) {
  return jax::returning([&] {
    jax::remove_axis(axis);
    return 0;
  });
}

// Ends everything, at the end of the process.
TORCH_OVERLAP_API void torch_overlap_jax_exit() { torch_overlap::run_exit_functions(); }

// `dtype`: XLA's number of the type. A negative option means the default of the method.
TORCH_OVERLAP_API int64_t torch_overlap_jax_create_buffer(
    int64_t axis, int64_t comm_type, int64_t method, int64_t tokens, int64_t features, int dtype,
    int tp_size, int num_splits, int num_max_streams, int comm_cga_size, int gemm_priority,
    int comm_priority, int num_comm_sm, int set_sm_margin, int use_ce, int atomic_gemm,
    int rs_overlap_first_gemm, int aggregate_ag, int relay_ag) {
  return jax::returning([&] {
    using torch_overlap::CommOverlapConfig;
    using torch_overlap::CommOverlapMethod;
    using torch_overlap::CommOverlapType;
    auto config = CommOverlapConfig::defaults(
        static_cast<CommOverlapType>(comm_type), static_cast<CommOverlapMethod>(method), tp_size,
        use_ce < 0 ? std::nullopt : std::optional<bool>(use_ce != 0));
    config.buffer_shape = {tokens, features};
    config.buffer_dtype = jax::scalar_type("create_comm_overlap_buffer", "buffer_dtype",
                                           static_cast<xla::ffi::DataType>(dtype));
    const auto set = [](auto& field, int value) {
      if (value >= 0) field = static_cast<std::remove_reference_t<decltype(field)>>(value);
    };
    set(config.num_splits, num_splits);
    set(config.num_max_streams, num_max_streams);
    set(config.comm_cga_size, comm_cga_size);
    config.gemm_priority = gemm_priority;
    config.comm_priority = comm_priority;
    set(config.num_comm_sm, num_comm_sm);
    set(config.set_sm_margin, set_sm_margin);
    config.atomic_gemm = atomic_gemm != 0;
    config.rs_overlap_first_gemm = rs_overlap_first_gemm != 0;
    config.aggregate_ag = aggregate_ag != 0;
    config.relay_ag = relay_ag != 0;
    return jax::create_buffer(axis, config);
  });
}

TORCH_OVERLAP_API int64_t torch_overlap_jax_destroy_buffer(int64_t id) {
  return jax::returning([&] {
    jax::destroy_buffer(id);
    return 0;
  });
}

TORCH_OVERLAP_API int64_t torch_overlap_jax_destroy_all_buffers() {
  return jax::returning([&] {
    jax::destroy_all_buffers();
    return 0;
  });
}

}  // extern "C"
