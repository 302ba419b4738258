#include "torch_overlap/comm/backends/nccl/one_sided.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/backends/nccl/bounded.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/cuda/stream.h"
#include "torch_overlap/common/cuda/thread_device.h"
#include "torch_overlap/symm/cuda/driver.h"

namespace torch_overlap {
namespace {

constexpr int kOneSidedSince = 22900;
constexpr size_t kMostStaging = 16 << 20;
constexpr size_t kPage = NCCL_WIN_REQUIRED_ALIGNMENT;
// A rank that fails early waits for those that wait for it in NCCL: for the unique id, for the
// communicator, and for the first operation.
constexpr int kStepsInNccl = 3;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// For as long as it lives the bootstrap is more patient.
class Patience {
 public:
  Patience(Bootstrap& bootstrap, Milliseconds timeout)
      : bootstrap_(bootstrap), before_(bootstrap.timeout()) {
    bootstrap.set_timeout(timeout);
  }
  ~Patience() { bootstrap_.set_timeout(before_); }
  Patience(const Patience&) = delete;
  Patience& operator=(const Patience&) = delete;

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
  if (version < kOneSidedSince || api.put_signal == nullptr ||
      api.comm_window_register == nullptr) {
    return {.can = false,
            .why = concat("one-sided operations need NCCL ", nccl_version_string(kOneSidedSince),
                          " or newer, and ", nccl_version_string(version), " is loaded")};
  }
  // NCCL binds every window to a multicast object as soon as three GPUs share an NVLink domain.
  if (size > 2 && api.may_nvls) {
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
  return whole_pages(static_cast<size_t>(size_) * SignalPad::kLineBytes);
}

uint64_t* OneSided::count_for(int dst) const {
  return reinterpret_cast<uint64_t*>(staging() + SignalPad::offset(dst));
}

void OneSided::stop() {
  {
    const std::lock_guard lock(stop_mutex_);
    is_stopped_ = true;
  }
  if (const auto handle = adopted()) handle->stop(Milliseconds(0));
}

void OneSided::require_running() {
  const std::lock_guard lock(stop_mutex_);
  TORCH_OVERLAP_CHECK(!is_stopped_, kState, "a communicator that was aborted meanwhile");
}

void OneSided::adopt(std::shared_ptr<NcclHandle> handle) {
  const std::lock_guard lock(stop_mutex_);
  handle_ = std::move(handle);
}

std::shared_ptr<NcclHandle> OneSided::adopted() {
  const std::lock_guard lock(stop_mutex_);
  return handle_;
}

void OneSided::allocate() {
  staging_bytes_ = std::min(kMostStaging, whole_pages(bytes_));
  staging_ =
      symmetric_empty({static_cast<int64_t>(counts_bytes() + staging_bytes_)}, at::kByte, device_);
}

OneSided::Place OneSided::place() const {
  if (data_ == nullptr) return {};
  const auto& driver = cuda::Driver::loaded();
  const auto address = reinterpret_cast<CUdeviceptr>(data_);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  driver.check(driver.range_of(&base, &bytes, address), "cuMemGetAddressRange");
  return {static_cast<size_t>(address - base), bytes};
}

// Collective: where each rank's tensor is. NCCL wants allocations of one size.
void OneSided::exchange_places(Bootstrap& bootstrap, std::string_view op, const Place& mine) {
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

void OneSided::enter(const std::vector<int>& peers) {
  cuda::use_device(device_.index());
  const std::lock_guard lock(handle_->mutex());
  TORCH_OVERLAP_CHECK(handle_->comm() != nullptr, kState,
                      "expected a live communicator, got one that was aborted");
  // All of the allocation: over a network NCCL counts from its begin, and not from the window's.
  if (data_ != nullptr) {
    data_window_ = add_window(static_cast<std::byte*>(data_) - offsets_[rank_], allocation_bytes_);
  }
  pad_window_ = add_window(pad_, SignalPad::bytes(size_));
  (void)add_window(staging(), staging_.nbytes());
  // At the first operation NCCL makes what all need, with all ranks: later a rank would be alone.
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
  Place mine;
  step([&] {
    require_running();
    allocate();
    mine = place();
  });
  agree(bootstrap, op, fault);
  exchange_places(bootstrap, op, mine);

  std::vector<int> peers;
  for (int rank = 0; rank < size_; ++rank) {
    if (!memory.is_reachable(rank)) peers.push_back(rank);
  }
  if (peers.empty()) peers.push_back(rank_);
  step([&] {
    require_running();
    adopt(NcclHandle::create(api, context, "the window's native communicator"));
    require_running();
    // The tensor's memory lives as long as the thread needs it.
    const auto enter = [self = shared_from_this(), peers, kept = memory.shared_from_this()] {
      try {
        self->enter(peers);
      } catch (const NcclError& error) {
        if (!error.is_refusal()) throw;
        fail(ErrorKind::kUnsupported, error.what(), "; NCCL_DEBUG=INFO shows what it lacks");
      }
    };
    TORCH_OVERLAP_CHECK(run_bounded_on_cuda(enter, context.options.timeout), kTimeout,
                        "no answer within ", context.options.timeout.count(),
                        " ms; look for the rank that did not come");
  });
  const Patience patience(bootstrap, kStepsInNccl * context.options.timeout + NcclHandle::kComeOut);
  try {
    agree(bootstrap, op, fault);
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
                   bool& begun) {
  const std::lock_guard lock(handle_->mutex());
  TORCH_OVERLAP_CHECK(handle_->comm() != nullptr, kState,
                      "put: expected a live communicator, got one that was stopped");
  std::byte* const room = staging() + counts_bytes();
  for (const auto& piece : remote_pieces(from, bytes, offset, data_, bytes_, staging_bytes_)) {
    if (piece.is_staged) {
      begun = true;  // the copy is on the stream, whatever NCCL then says
      cuda::check(cudaMemcpyAsync(room, piece.from, piece.bytes, cudaMemcpyDeviceToDevice, stream),
                  "put");
    }
    put_from(piece.is_staged ? room : piece.from, piece.bytes, dst, data_window_,
             offsets_[dst] + piece.offset, stream);
    begun = true;
  }
}

void OneSided::signal(int dst, const cuda::WaitBoard& board, cudaStream_t stream, bool& begun) {
  const std::lock_guard lock(handle_->mutex());
  TORCH_OVERLAP_CHECK(handle_->comm() != nullptr, kState,
                      "signal: expected a live communicator, got one that was stopped");
  uint64_t* const count = count_for(dst);
  board.signal(count, stream);
  begun = true;  // counted: it goes with the next one if this does not
  put_from(count, sizeof(*count), dst, pad_window_, SignalPad::offset(rank_), stream);
}

void OneSided::close(std::chrono::milliseconds limit) {
  const auto handle = adopted();
  if (!handle) return;  // its registration is under way
  // Nobody needs it any more, so nothing is lost but what NCCL keeps.
  try {
    if (handle->close(limit)) return;
    TORCH_WARN("NCCL did not free what a window had within ", limit.count(),
               " ms; it goes on in the background");
  } catch (const std::exception& error) {
    TORCH_WARN("NCCL did not free what a window had: ", error.what());
  }
}

}  // namespace torch_overlap
