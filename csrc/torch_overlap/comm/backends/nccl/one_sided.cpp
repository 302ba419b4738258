#include "torch_overlap/comm/backends/nccl/one_sided.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/cuda/stream.h"
#include "torch_overlap/common/cuda/thread_device.h"
#include "torch_overlap/symm/cuda/driver.h"

namespace torch_overlap {
namespace {

constexpr int kOneSidedMinVersion = 22900;
constexpr size_t kMaxStagingBytes = 16 << 20;
constexpr size_t kPageBytes = NCCL_WIN_REQUIRED_ALIGNMENT;
// A rank that fails early waits for the ranks that still wait for it in NCCL, in each of these
// steps: the unique ID, the communicator, and the first operation.
constexpr int kNumNcclSteps = 3;

size_t round_up_to_page(size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

// Changes the timeout of a bootstrap until destroyed.
class ScopedTimeout {
 public:
  ScopedTimeout(Bootstrap& bootstrap, Milliseconds timeout)
      : bootstrap_(bootstrap), before_(bootstrap.timeout()) {
    bootstrap.set_timeout(timeout);
  }
  ~ScopedTimeout() { bootstrap_.set_timeout(before_); }
  ScopedTimeout(const ScopedTimeout&) = delete;
  ScopedTimeout& operator=(const ScopedTimeout&) = delete;

 private:
  Bootstrap& bootstrap_;
  const Milliseconds before_;
};

}  // namespace

RemotePieces remote_pieces(const void* from, size_t bytes, size_t offset, const void* begin,
                           size_t known, size_t staging) {
  const auto* data = static_cast<const std::byte*>(from);
  const auto distance = reinterpret_cast<uintptr_t>(from) - reinterpret_cast<uintptr_t>(begin);
  const bool is_known = distance <= known && bytes <= known - distance;
  RemotePieces pieces;
  for (size_t done = 0; done < bytes;) {
    const size_t count = is_known ? bytes : std::min(staging, bytes - done);
    pieces.push_back({data + done, count, offset + done, !is_known});
    done += count;
  }
  return pieces;
}

Backend::RemoteSupport OneSided::support(const NcclApi& api, int size) {
  const int version = api.version();
  if (version < kOneSidedMinVersion || api.put_signal == nullptr ||
      api.comm_window_register == nullptr) {
    return {
        .can = false,
        .why = concat("one-sided operations need NCCL ", nccl_version_string(kOneSidedMinVersion),
                      " or newer, and ", nccl_version_string(version), " is loaded")};
  }
  // NCCL binds every window to a multicast object if three or more GPUs share an NVLink domain.
  if (size > 2 && api.is_nvls_enabled) {
    return {.can = false,
            .why =
                "NCCL's one-sided operations would make NVLink multicast objects of windows; "
                "set NCCL_NVLS_ENABLE=0 before the first communicator of the process"};
  }
  return {.can = true};
}

OneSided::OneSided(const SymmetricMemory& memory)
    : device_(memory.device()),
      rank_(memory.rank()),
      size_(memory.size()),
      data_(memory.pointer(memory.rank())),
      bytes_(memory.bytes()),
      pad_(memory.signals().own()) {}

size_t OneSided::counts_bytes() const {
  return round_up_to_page(static_cast<size_t>(size_) * SignalPad::kSlotBytes);
}

uint64_t* OneSided::count_for(int dst) const {
  return reinterpret_cast<uint64_t*>(staging() + SignalPad::offset(dst));
}

void OneSided::stop() {
  {
    const std::lock_guard lock(stop_mutex_);
    is_stopped_ = true;
  }
  if (const auto handle = get_handle()) handle->stop(Milliseconds(0));
}

void OneSided::require_running() {
  const std::lock_guard lock(stop_mutex_);
  TORCH_OVERLAP_CHECK(!is_stopped_, kState, "a communicator that was aborted meanwhile");
}

void OneSided::set_handle(std::shared_ptr<NcclHandle> handle) {
  const std::lock_guard lock(stop_mutex_);
  handle_ = std::move(handle);
}

std::shared_ptr<NcclHandle> OneSided::get_handle() {
  const std::lock_guard lock(stop_mutex_);
  return handle_;
}

void OneSided::allocate() {
  staging_bytes_ = std::min(kMaxStagingBytes, round_up_to_page(bytes_));
  *staging_ =
      symmetric_empty({static_cast<int64_t>(counts_bytes() + staging_bytes_)}, at::kByte, device_);
}

OneSided::TensorLocation OneSided::place() const {
  if (data_ == nullptr) return {};
  const auto& driver = cuda::Driver::loaded();
  const auto address = reinterpret_cast<CUdeviceptr>(data_);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  driver.check(driver.range_of(&base, &bytes, address), "cuMemGetAddressRange");
  return {static_cast<size_t>(address - base), bytes};
}

// Collective. Exchanges the location of each rank's tensor. NCCL requires allocations of equal
// size.
void OneSided::exchange_locations(Bootstrap& bootstrap, std::string_view op,
                                  const TensorLocation& mine) {
  allocation_bytes_ = mine.allocation_bytes;
  const auto all = bootstrap.all_gather(pack({concat(mine.offset), concat(mine.allocation_bytes)}));
  const auto first = unpack(all[0]);
  for (int rank = 0; rank < size_; ++rank) {
    const auto fields = unpack(all[rank]);
    offsets_.push_back(parse_int(fields.at(0), "the place of another rank's tensor"));
    TORCH_OVERLAP_CHECK(fields.at(1) == first.at(1), kValue, op,
                        ": expected tensors in allocations of one size, as NCCL reaches memory "
                        "that is not mapped, got one of ",
                        first.at(1), " bytes on rank 0 and of ", fields.at(1), " on rank ", rank,
                        "; make them with torch_overlap.symmetric_empty");
  }
}

ncclWindow_t OneSided::add_window(void* data, size_t bytes) {
  const NcclApi& api = handle_->api();
  ncclWindow_t window = nullptr;
  nccl_check(
      api, api.comm_window_register(handle_->comm(), data, bytes, &window, NCCL_WIN_COLL_SYMMETRIC),
      "ncclCommWindowRegister");
  TORCH_OVERLAP_CHECK(window != nullptr, kUnsupported,
                      "ncclCommWindowRegister: expected a window, got none; NCCL_DEBUG=INFO shows "
                      "what it needs for symmetric memory and lacks");
  return window;
}

void OneSided::register_windows(const std::vector<int>& peers) {
  cuda::use_device(device_.index());
  const std::lock_guard lock(handle_->mutex());
  TORCH_OVERLAP_CHECK(handle_->comm() != nullptr, kState,
                      "expected a live communicator, got one that was aborted");
  // Registers the whole allocation: over a network NCCL counts from its start, not the window's.
  if (data_ != nullptr) {
    data_window_ = add_window(static_cast<std::byte*>(data_) - offsets_[rank_], allocation_bytes_);
  }
  pad_window_ = add_window(pad_, SignalPad::bytes(size_));
  (void)add_window(staging(), staging_->nbytes());
  // At the first operation NCCL creates shared state, which all ranks must join: later a rank would
  // wait for the others.
  const cuda::OwnedStream stream(device_.index(), /*high_priority=*/false);
  for (const int peer : peers) {
    put_from(count_for(peer), sizeof(uint64_t), peer, pad_window_, SignalPad::offset(rank_),
             stream.get().stream());
  }
  cuda::check(cudaStreamSynchronize(stream.get().stream()), "cudaStreamSynchronize");
}

void OneSided::open(const NcclApi& api, const BackendContext& context, Bootstrap& bootstrap,
                    std::string_view op, SymmetricMemory& memory) {
  Fault fault;
  const auto step = [&](const auto& body) {
    try {
      body();
    } catch (...) {
      fault = Fault::current();
      fault.text = concat(op, ": expected NCCL to reach memory that is not mapped (",
                          memory.unreachable_pair(), "), got: ", fault.text);
    }
  };
  TensorLocation mine;
  step([&] {
    require_running();
    allocate();
    mine = place();
  });
  throw_if_any_failed(bootstrap, op, fault);
  exchange_locations(bootstrap, op, mine);

  std::vector<int> peers;
  for (int rank = 0; rank < size_; ++rank) {
    if (!memory.is_reachable(rank)) peers.push_back(rank);
  }
  if (peers.empty()) peers.push_back(rank_);
  step([&] {
    require_running();
    set_handle(NcclHandle::create(api, context, "the window's native communicator"));
    require_running();
    // The captured reference keeps the tensor's memory alive until the thread ends.
    const auto register_windows = [self = shared_from_this(), peers,
                                   kept = memory.shared_from_this()] {
      try {
        self->register_windows(peers);
      } catch (const NcclError& error) {
        if (!error.is_refusal()) throw;
        fail(ErrorKind::kUnsupported, error.what(), "; NCCL_DEBUG=INFO shows what it lacks");
      }
    };
    TORCH_OVERLAP_CHECK(run_bounded_on_cuda(register_windows, context.options.timeout), kTimeout,
                        "no answer within ", context.options.timeout.count(),
                        " ms; look for the rank that did not come");
  });
  const ScopedTimeout patience(
      bootstrap, kNumNcclSteps * context.options.timeout + NcclHandle::kNcclExitTimeout);
  try {
    throw_if_any_failed(bootstrap, op, fault);
  } catch (...) {
    stop();
    throw;
  }
}

void OneSided::put_from(const void* from, size_t bytes, int dst, ncclWindow_t window, size_t offset,
                        cudaStream_t stream) {
  const NcclApi& api = handle_->api();
  nccl_check(api,
             api.put_signal(from, bytes, ncclUint8, dst, window, offset, /*signal=*/0,
                            /*context=*/0, /*flags=*/0, handle_->comm(), stream),
             "ncclPutSignal");
}

void OneSided::put(const void* from, size_t bytes, int dst, size_t offset, cudaStream_t stream,
                   bool& has_launched) {
  const std::lock_guard lock(handle_->mutex());
  TORCH_OVERLAP_CHECK(handle_->comm() != nullptr, kState,
                      "put: expected a live communicator, got one that was stopped");
  std::byte* const staging_data = staging() + counts_bytes();
  for (const auto& piece : remote_pieces(from, bytes, offset, data_, bytes_, staging_bytes_)) {
    if (piece.is_staged) {
      has_launched = true;  // the copy is enqueued, even if NCCL then fails
      cuda::check(
          cudaMemcpyAsync(staging_data, piece.from, piece.bytes, cudaMemcpyDeviceToDevice, stream),
          "put");
    }
    put_from(piece.is_staged ? staging_data : piece.from, piece.bytes, dst, data_window_,
             offsets_[dst] + piece.offset, stream);
    has_launched = true;
  }
}

void OneSided::signal(int dst, const cuda::DeviceWaitMonitor& monitor, cudaStream_t stream,
                      bool& has_launched) {
  const std::lock_guard lock(handle_->mutex());
  TORCH_OVERLAP_CHECK(handle_->comm() != nullptr, kState,
                      "signal: expected a live communicator, got one that was stopped");
  uint64_t* const count = count_for(dst);
  monitor.signal(count, stream);
  has_launched = true;  // counted: if this put fails, the next one delivers it
  put_from(count, sizeof(*count), dst, pad_window_, SignalPad::offset(rank_), stream);
}

void OneSided::close(std::chrono::milliseconds limit) {
  const auto handle = get_handle();
  if (!handle) return;  // it is still being created
  // No rank needs it any more, so a failure only leaks NCCL's resources.
  try {
    if (handle->close(limit)) return;
    TORCH_WARN("NCCL did not free what a window had within ", limit.count(),
               " ms; it goes on in the background");
  } catch (const std::exception& error) {
    TORCH_WARN("NCCL did not free what a window had: ", error.what());
  }
}

}  // namespace torch_overlap
