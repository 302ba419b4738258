#include "torch_overlap/symm/symmetric_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <atomic>
#include <map>
#include <mutex>

#include "torch_overlap/base/process.h"
#include "torch_overlap/symm/allocator.h"

namespace torch_overlap {
namespace {

std::atomic<uint64_t> next_id{0};

struct Allocators {
  ForkSafeMutex mutex;
  std::map<c10::DeviceType, std::shared_ptr<SymmetricAllocator>> by_type;
};

Allocators& allocators() { return LeakySingleton<Allocators>::get(); }

}  // namespace

void register_symmetric_allocator(c10::DeviceType type,
                                  std::shared_ptr<SymmetricAllocator> allocator) {
  const std::lock_guard lock(allocators().mutex);
  // The old one is destroyed after the lock is released.
  allocators().by_type[type].swap(allocator);
}

SymmetricAllocator& symmetric_allocator(std::string_view op, c10::DeviceType type) {
  const std::lock_guard lock(allocators().mutex);
  const auto found = allocators().by_type.find(type);
  TORCH_OVERLAP_CHECK(found != allocators().by_type.end(), kUnsupported, op,
                      ": expected a device whose memory ranks can share, got ", type,
                      "; use a CPU or CUDA device (CUDA needs a build with it, FORCE_CUDA=1)");
  return *found->second;
}

at::Tensor symmetric_empty(c10::IntArrayRef sizes, at::ScalarType dtype, c10::Device device) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) {
    TORCH_OVERLAP_CHECK(size >= 0, kValue, "symmetric_empty: expected sizes >= 0, got ", sizes);
    TORCH_OVERLAP_CHECK(!__builtin_mul_overflow(bytes, size, &bytes), kValue,
                        "symmetric_empty: expected sizes whose bytes can be counted, got ", sizes);
  }
  auto& allocator = symmetric_allocator("symmetric_empty", device.type());
  const c10::InferenceMode outside(false);  // users of the memory write to it in any mode
  if (bytes == 0) return at::empty(sizes, at::TensorOptions().dtype(dtype).device(device));
  return allocator.allocate(bytes, device).view(dtype).view(sizes);
}

SymmetricMemory::SymmetricMemory(int rank, int size, const Request& request)
    : rank_(rank),
      id_(next_id.fetch_add(1)),
      name_(request.name),
      device_(request.tensor.device()),
      bytes_(request.tensor.nbytes()),
      pointers_(size),
      unreachable_reasons_(size) {
  pointers_[rank] = bytes_ == 0 ? nullptr : request.tensor.mutable_data_ptr();
}

SymmetricMemory::~SymmetricMemory() = default;

std::shared_ptr<SymmetricMemory> SymmetricMemory::create_without_peers(int rank, int size,
                                                                       const Request& request) {
  if (request.fault) throw Error(request.fault.kind, request.fault.text);
  std::shared_ptr<SymmetricMemory> memory(new SymmetricMemory(rank, size, request));
  for (int peer = 0; peer < size; ++peer) {
    if (peer != rank) memory->unreachable_reasons_[peer] = "the communicator has no peers";
  }
  return memory;
}

at::Tensor SymmetricMemory::view(int rank, c10::IntArrayRef sizes, at::ScalarType dtype,
                                 int64_t offset) {
  const auto options = at::TensorOptions().dtype(dtype).device(device_);
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) bytes *= size;
  if (bytes == 0) return at::empty(sizes, options);
  TORCH_OVERLAP_CHECK(offset >= 0 && offset + bytes <= static_cast<int64_t>(bytes_), kValue,
                      "view: expected a range of ", name_, "'s ", bytes_, " bytes, got ", bytes,
                      " from ", offset);
  TORCH_OVERLAP_CHECK(pointers_.at(rank) != nullptr, kUnsupported,
                      "view: expected a rank whose memory can be reached, got ", rank, " of '",
                      name_, "'");
  return at::from_blob(
      static_cast<std::byte*>(pointers_[rank]) + offset, sizes,
      [self = shared_from_this()](void*) mutable { self.reset(); }, options, device_);
}

}  // namespace torch_overlap
