#include "torch_overlap/symm/cuda/vmm.h"

#include <c10/cuda/CUDAGuard.h>

#include <iterator>
#include <map>
#include <mutex>
#include <vector>

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap::cuda {
namespace {

// Returns true if network cards can access such memory, which NCCL makes them do for one_sided.h.
bool supports_gpu_direct_rdma(c10::DeviceIndex index) {
  const Driver& driver = Driver::loaded();
  CUdevice device = 0;
  int is = 0;
  driver.check(driver.device(&device, index), "cuDeviceGet");
  driver.check(
      driver.attribute_of(&is, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device),
      "cuDeviceGetAttribute");
  return is != 0;
}

CUmemAllocationProp properties(c10::DeviceIndex device) {
  CUmemAllocationProp out{};
  out.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  out.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  out.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  out.location.id = device;
  out.allocFlags.gpuDirectRDMACapable = supports_gpu_direct_rdma(device) ? 1 : 0;
  return out;
}

void unmap(CUdeviceptr address, uint64_t bytes) noexcept {
  // At the end of the process the driver may be shut down already: errors are ignored.
  const Driver& driver = Driver::loaded();
  (void)driver.unmap(address, bytes);
  (void)driver.free_address(address, bytes);
}

// Mappings without an owner that the device may still use. Each is unmapped when an event on its
// stream has completed. Never destroyed.
class DeferredUnmapper {
 public:
  static DeferredUnmapper& instance() {
    static auto* const unmapper = new DeferredUnmapper;
    return *unmapper;
  }

  void add(c10::cuda::CUDAStream stream, CUdeviceptr address, uint64_t bytes) noexcept {
    try {
      const c10::cuda::CUDAGuard guard(stream.device_index());
      const RelaxedCapture relaxed;
      PendingUnmap one{stream, nullptr, false, address, bytes};
      check(cudaEventCreateWithFlags(&one.event, cudaEventDisableTiming), "cudaEventCreate");
      const std::lock_guard lock(mutex_);
      pending_.push_back(one);
    } catch (const std::exception&) {  // then it stays mapped
    }
    unmap_ready(stream.device_index());
  }

  // Unmaps the mappings that the device does not use any more.
  void unmap_ready(c10::DeviceIndex device) noexcept {
    try {
      const c10::cuda::CUDAGuard guard(device);
      const RelaxedCapture relaxed;
      const std::lock_guard lock(mutex_);
      std::erase_if(pending_, [&](PendingUnmap& one) {
        return one.stream.device_index() == device && end(one);
      });
    } catch (const std::exception&) {  // the device failed
    }
  }

 private:
  struct PendingUnmap {
    c10::cuda::CUDAStream stream;
    cudaEvent_t event;
    bool is_recorded;
    CUdeviceptr address;
    uint64_t bytes;
  };

  static bool end(PendingUnmap& one) noexcept {
    one.is_recorded = one.is_recorded || record(one);
    if (!one.is_recorded || cudaEventQuery(one.event) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    (void)cudaEventDestroy(one.event);
    unmap(one.address, one.bytes);
    return true;
  }

  // Records the event, unless the stream is captured, or cannot be queried because another one is.
  static bool record(const PendingUnmap& one) noexcept {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const auto stream = one.stream.stream();
    const bool can = cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
                     status == cudaStreamCaptureStatusNone;
    const bool done = can && cudaEventRecord(one.event, stream) == cudaSuccess;
    if (!done) (void)cudaGetLastError();
    return done;
  }

  std::mutex mutex_;
  std::vector<PendingUnmap> pending_;
};

// Live mappings of create(), by address.
struct LiveMappings {
  std::mutex mutex;
  std::map<const std::byte*, std::weak_ptr<VirtualMapping>> by_address;
};

LiveMappings& made() {
  static auto* instance = new LiveMappings;
  return *instance;
}

}  // namespace

VirtualMapping::VirtualMapping(c10::DeviceIndex device, CUmemGenericAllocationHandle handle,
                               uint64_t bytes)
    : device_(device), bytes_(bytes), stream_(c10::cuda::getCurrentCUDAStream(device)) {
  const Driver& driver = Driver::loaded();
  CUdeviceptr address = 0;
  driver.check(driver.reserve(&address, bytes, /*alignment=*/0, /*addr=*/0, /*flags=*/0),
               "cuMemAddressReserve");
  CUresult status = driver.map(address, bytes, /*offset=*/0, handle, /*flags=*/0);
  if (status != CUDA_SUCCESS) {
    (void)driver.free_address(address, bytes);
    driver.check(status, "cuMemMap");
  }
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  status = driver.set_access(address, bytes, &access, 1);
  if (status != CUDA_SUCCESS) {
    unmap(address, bytes);
    driver.check(status, "cuMemSetAccess");
  }
  address_ = address;
}

VirtualMapping::~VirtualMapping() {
  {
    const std::lock_guard lock(made().mutex);
    made().by_address.erase(begin());  // imported mappings have no entry
  }
  DeferredUnmapper::instance().add(stream_, address_, bytes_);
}

std::shared_ptr<VirtualMapping> VirtualMapping::find(const void* pointer) {
  // Destroyed after the lock is released if it is not the one.
  std::shared_ptr<VirtualMapping> found;
  const std::lock_guard lock(made().mutex);
  const auto* address = static_cast<const std::byte*>(pointer);
  const auto after = made().by_address.upper_bound(address);
  if (after == made().by_address.begin()) return nullptr;
  found = std::prev(after)->second.lock();
  return found && address < found->begin() + found->bytes() ? found : nullptr;
}

std::shared_ptr<VirtualMapping> VirtualMapping::create(c10::DeviceIndex device, uint64_t bytes) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCapture relaxed;                  // torch's allocator may grow a pool in a capture
  check(cudaFree(nullptr), "symmetric memory");  // the driver needs a context
  DeferredUnmapper::instance().unmap_ready(device);
  const Driver& driver = Driver::loaded();
  const auto wanted = properties(device);
  size_t step = 0;
  driver.check(driver.granularity(&step, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
               "cuMemGetAllocationGranularity");
  const uint64_t rounded = (bytes + step - 1) / step * step;
  CUmemGenericAllocationHandle created = 0;
  const CUresult status = driver.create(&created, rounded, &wanted, /*flags=*/0);
  TORCH_OVERLAP_CHECK(status != CUDA_ERROR_OUT_OF_MEMORY, kRuntime, "symmetric memory: expected ",
                      rounded, " bytes on cuda:", static_cast<int>(device),
                      ", got none: the device's memory is full; ",
                      "torch.cuda.empty_cache() gives back what torch keeps");
  driver.check(status, "cuMemCreate");
  const MemoryHandle handle(created);  // the mapping keeps the memory alive
  std::shared_ptr<VirtualMapping> mapping(new VirtualMapping(device, handle.get(), rounded));
  const std::lock_guard lock(made().mutex);
  made().by_address.insert_or_assign(mapping->begin(), mapping);
  return mapping;
}

std::shared_ptr<VirtualMapping> VirtualMapping::import(c10::DeviceIndex device,
                                                       const Descriptor& descriptor,
                                                       uint64_t bytes) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCapture relaxed;
  check(cudaFree(nullptr), "symmetric memory");
  DeferredUnmapper::instance().unmap_ready(device);
  const Driver& driver = Driver::loaded();
  CUmemGenericAllocationHandle imported = 0;
  auto* os_handle = reinterpret_cast<void*>(static_cast<uintptr_t>(descriptor.get()));
  driver.check(driver.import_handle(&imported, os_handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               "cuMemImportFromShareableHandle");
  const MemoryHandle handle(imported);
  return std::shared_ptr<VirtualMapping>(new VirtualMapping(device, handle.get(), bytes));
}

bool is_exportable(const void* pointer) {
  const RelaxedCapture relaxed;
  const Driver& driver = Driver::loaded();
  CUmemGenericAllocationHandle found = 0;
  if (driver.handle_of(&found, const_cast<void*>(pointer)) != CUDA_SUCCESS) return false;
  const MemoryHandle handle(found);
  CUmemAllocationProp made{};
  driver.check(driver.properties_of(&made, handle.get()), "cuMemGetAllocationPropertiesFromHandle");
  return made.requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE;
}

}  // namespace torch_overlap::cuda
