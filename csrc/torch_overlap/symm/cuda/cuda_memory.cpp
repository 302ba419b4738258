// Device memory that other processes of the host can map: CUDA virtual memory, exported as file
// descriptors. Multicast objects are never used: they can take a shared host down.
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>
#include <sys/types.h>

#include <cstring>
#include <map>
#include <mutex>
#include <optional>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/common/capture.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/cuda/stream.h"
#include "torch_overlap/symm/allocator.h"
#include "torch_overlap/symm/cuda/vmm.h"

namespace torch_overlap {
namespace {

using cuda::Driver;
using cuda::MemoryHandle;
using cuda::VirtualMapping;

// Mappings that torch's caching allocator holds through get_mem_allocator(), by address.
struct PoolMappings {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<VirtualMapping>> by_address;
};

PoolMappings& pool_mappings() {
  static auto* instance = new PoolMappings;
  return *instance;
}

// Mapping that contains a range of device memory.
struct Range {
  CUdeviceptr base = 0;
  uint64_t bytes = 0;
  std::shared_ptr<void> keep_alive;
};

std::string uuid_of(c10::DeviceIndex device) {
  const auto& uuid = at::cuda::getDeviceProperties(device)->uuid;
  return std::string(uuid.bytes, sizeof(uuid.bytes));
}

// Returns the device with this UUID; empty if it is hidden from this process
// (CUDA_VISIBLE_DEVICES).
std::optional<c10::DeviceIndex> device_of(const std::string& uuid) {
  for (c10::DeviceIndex device = 0; device < c10::cuda::device_count(); ++device) {
    if (uuid_of(device) == uuid) return device;
  }
  return std::nullopt;
}

class CudaAllocator final : public SymmetricAllocator {
 public:
  void check_not_capturing(std::string_view op) const override {
    torch_overlap::check_not_capturing(op, {c10::kCUDA, c10::cuda::current_device()});
  }

  at::Tensor allocate(int64_t bytes, c10::Device device) override {
    check_not_capturing("symmetric_empty");
    const c10::Device placed(c10::kCUDA,
                             device.has_index() ? device.index() : c10::cuda::current_device());
    auto mapping = VirtualMapping::create(placed.index(), static_cast<uint64_t>(bytes));
    std::byte* pointer = mapping->begin();
    {
      // The memory must be zero before other ranks know of it.
      const c10::cuda::CUDAGuard guard(placed);
      const cuda::RelaxedCapture relaxed;
      const cuda::OwnedStream stream(placed.index(), /*high_priority=*/false);
      cuda::check(cudaMemsetAsync(pointer, 0, mapping->bytes(), stream.get().stream()),
                  "cudaMemsetAsync");
      cuda::check(cudaStreamSynchronize(stream.get().stream()), "cudaStreamSynchronize");
    }
    return at::from_blob(
        pointer, {bytes}, [kept = std::move(mapping)](void*) mutable { kept.reset(); },
        at::TensorOptions().dtype(at::kByte).device(placed), placed);
  }

  // Exports any memory that can be exported: that of this allocator, of pools over it, and of
  // NCCL's or torch's own symmetric memory.
  Export share(std::string_view op, const at::Tensor& tensor) override {
    const c10::cuda::CUDAGuard guard(tensor.device());
    const Driver& driver = Driver::loaded();
    void* const begin = tensor.mutable_data_ptr();
    CUmemGenericAllocationHandle found = 0;
    const char* const advice =
        "; make the tensor with torch_overlap.symmetric_empty, or under a torch.cuda.MemPool over "
        "get_mem_allocator()";
    const CUresult status = driver.handle_of(&found, begin);
    TORCH_OVERLAP_CHECK(status == CUDA_SUCCESS, kValue, op,
                        ": expected memory that other ranks can map, got a tensor of plain CUDA "
                        "memory",
                        advice);
    const auto handle = std::make_shared<MemoryHandle>(found);
    CUmemAllocationProp made{};
    driver.check(driver.properties_of(&made, handle->get()),
                 "cuMemGetAllocationPropertiesFromHandle");
    TORCH_OVERLAP_CHECK(
        (made.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0, kValue, op,
        ": expected memory that can be passed as a descriptor, got one that was not made for it",
        advice);
    Range range;
    if (const auto mapping = VirtualMapping::find(begin)) {
      range = {reinterpret_cast<CUdeviceptr>(mapping->begin()), mapping->bytes(), mapping};
    } else {
      size_t bytes = 0;
      driver.check(driver.range_of(&range.base, &bytes, reinterpret_cast<CUdeviceptr>(begin)),
                   "cuMemGetAddressRange");
      range.bytes = bytes;
      range.keep_alive = handle;
    }
    const uint64_t offset = reinterpret_cast<CUdeviceptr>(begin) - range.base;
    TORCH_OVERLAP_CHECK(offset + tensor.nbytes() <= range.bytes, kValue, op,
                        ": expected a tensor inside one allocation of ", range.bytes,
                        " bytes, got one that reaches over its end", advice);
    int descriptor = -1;
    driver.check(driver.export_handle(&descriptor, handle->get(),
                                      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, /*flags=*/0),
                 "cuMemExportToShareableHandle");
    Export shared;
    shared.descriptor = Descriptor(descriptor);
    shared.allocation_bytes = range.bytes;
    shared.offset = offset;
    shared.device = uuid_of(tensor.device().index());
    shared.keep_alive = std::move(range.keep_alive);
    // This rank's earlier writes must be complete before another rank writes.
    const cuda::RelaxedCapture relaxed;
    c10::cuda::getCurrentCUDAStream(tensor.device().index()).synchronize();
    return shared;
  }

  std::string unreachable_reason(c10::Device device, const std::string& theirs) override {
    const int me = device.index();
    const auto seen = device_of(theirs);
    if (!seen || *seen == me) return {};  // for a hidden device, mapping the memory shows it
    const int peer = *seen;
    int can = 0;
    cuda::check(cudaDeviceCanAccessPeer(&can, me, peer), "cudaDeviceCanAccessPeer");
    if (can == 0) {
      return concat("cuda:", me, " cannot access cuda:", peer,
                    " (no peer access between the two; nvidia-smi topo -p2p r shows it)");
    }
    int atomics = 0;
    cuda::check(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, me, peer),
                "cudaDeviceGetP2PAttribute");
    if (atomics == 0) {
      return concat("cuda:", me, " has no atomic operations on the memory of cuda:", peer,
                    " (the link between the two is not NVLink), which signals need");
    }
    return {};
  }

  bool sees(const std::string& theirs) override { return device_of(theirs).has_value(); }

  // False: access is granted per mapping, so threads with a device each map the memory themselves.
  bool has_shared_address_space() const override { return false; }

  Mapping map(c10::Device device, const Descriptor& descriptor, uint64_t allocation_bytes,
              uint64_t offset) override {
    auto mapping = VirtualMapping::import(device.index(), descriptor, allocation_bytes);
    return {mapping->begin() + offset, mapping};
  }
};

const SymmetricAllocatorRegistration cuda_registration(c10::kCUDA,
                                                       std::make_shared<CudaAllocator>());

}  // namespace
}  // namespace torch_overlap

// For torch.cuda.memory.CUDAPluggableAllocator. Null makes the caching allocator free its cached
// memory and retry.
extern "C" {

TORCH_OVERLAP_API void* torch_overlap_symmetric_alloc(ssize_t bytes, int device, cudaStream_t) {
  using namespace torch_overlap;
  if (bytes <= 0) return nullptr;
  try {
    auto mapping =
        VirtualMapping::create(static_cast<c10::DeviceIndex>(device), static_cast<uint64_t>(bytes));
    void* const pointer = mapping->begin();
    const std::lock_guard lock(pool_mappings().mutex);
    pool_mappings().by_address.insert_or_assign(pointer, std::move(mapping));
    return pointer;
  } catch (const std::exception& error) {
    TORCH_WARN("symmetric memory for a pool: ", error.what());
    return nullptr;
  }
}

TORCH_OVERLAP_API void torch_overlap_symmetric_free(void* pointer, ssize_t, int, cudaStream_t) {
  using namespace torch_overlap;
  std::shared_ptr<VirtualMapping> last;  // unmapped after the lock is released
  const std::lock_guard lock(pool_mappings().mutex);
  const auto found = pool_mappings().by_address.find(pointer);
  if (found == pool_mappings().by_address.end()) return;
  last = std::move(found->second);
  pool_mappings().by_address.erase(found);
}

}  // extern "C"
