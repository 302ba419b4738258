#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "torch_overlap/symm/cuda/driver.h"
#include "torch_overlap/symm/descriptors.h"

namespace torch_overlap::cuda {

// Device memory mapped into this process's address space: created here, or imported from another
// process. After destruction it stays mapped until the device has completed the work that was then
// on the stream that was current at creation. It is unmapped when the next mapping is created or
// destroyed. A user on other streams must order them before that stream first, as for memory of
// torch's allocator; operations on a window keep the mapping alive themselves. Waiting for the
// whole device would break a capture that another thread has begun.
//
// Threads: any.
class VirtualMapping {
 public:
  // Allocates `bytes`, rounded up to the granularity of the device. Throws if memory is
  // insufficient.
  static std::shared_ptr<VirtualMapping> create(c10::DeviceIndex device, uint64_t bytes);
  // Maps the memory of `descriptor`: all of the exported memory, `bytes`.
  static std::shared_ptr<VirtualMapping> import(c10::DeviceIndex device,
                                                const Descriptor& descriptor, uint64_t bytes);
  // Returns the mapping of create() that contains `pointer`; null if there is none.
  static std::shared_ptr<VirtualMapping> find(const void* pointer);
  ~VirtualMapping();
  VirtualMapping(const VirtualMapping&) = delete;
  VirtualMapping& operator=(const VirtualMapping&) = delete;

  std::byte* begin() const { return reinterpret_cast<std::byte*>(address_); }
  uint64_t bytes() const { return bytes_; }
  c10::DeviceIndex device() const { return device_; }

 private:
  VirtualMapping(c10::DeviceIndex device, CUmemGenericAllocationHandle handle, uint64_t bytes);

  const c10::DeviceIndex device_;
  const uint64_t bytes_;
  const c10::cuda::CUDAStream stream_;
  CUdeviceptr address_ = 0;
};

// Handle of memory, which lives as long as a handle or a mapping of it.
class MemoryHandle {
 public:
  explicit MemoryHandle(CUmemGenericAllocationHandle handle) : handle_(handle) {}
  ~MemoryHandle() { (void)Driver::loaded().release(handle_); }
  MemoryHandle(const MemoryHandle&) = delete;
  MemoryHandle& operator=(const MemoryHandle&) = delete;

  CUmemGenericAllocationHandle get() const { return handle_; }

 private:
  const CUmemGenericAllocationHandle handle_;
};

// Returns true if the memory at `pointer` was allocated for other processes to map.
bool is_exportable(const void* pointer);

}  // namespace torch_overlap::cuda
