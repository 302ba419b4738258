#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "torch_overlap/symm/cuda/driver.h"
#include "torch_overlap/symm/descriptors.h"

namespace torch_overlap::cuda {

// Device memory in this process's address space: made here, or imported from another process. After
// its end it stays mapped until the device has done what was by then on the stream that was current
// when it was made, and goes when the next mapping is made or ends. Who uses it on other streams
// orders them first, as for memory of torch's allocator; operations on a window keep it themselves.
// Waiting for the whole device would break a capture that another thread has begun.
//
// Threads: any.
class VirtualMapping {
 public:
  // `bytes`, rounded up to what the device deals in. Throws on too little memory.
  static std::shared_ptr<VirtualMapping> create(c10::DeviceIndex device, uint64_t bytes);
  // What `descriptor` stands for: all of the exported memory, `bytes`.
  static std::shared_ptr<VirtualMapping> import(c10::DeviceIndex device,
                                                const Descriptor& descriptor, uint64_t bytes);
  // The one made by create() that `pointer` lies in; null if there is none.
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

// A handle of memory, which lives as long as a handle or a mapping of it does.
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

// Whether the memory at `pointer` was made for other processes to map.
bool is_shareable(const void* pointer);

}  // namespace torch_overlap::cuda
