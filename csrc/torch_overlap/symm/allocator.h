#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "torch_overlap/base/export.h"
#include "torch_overlap/symm/descriptors.h"

namespace torch_overlap {

// Memory of one device type that other ranks can map. Each type has a directory (host/, cuda/) and
// registers itself, so the build determines which types exist.
//
// Threads: any.
class TORCH_OVERLAP_API SymmetricAllocator {
 public:
  virtual ~SymmetricAllocator() = default;

  // Throws if the calling thread's current stream of such a device is being captured in a graph:
  // memory is neither allocated nor mapped there. `op` is for the error.
  virtual void check_not_capturing(std::string_view op) const {}

  // Allocates `bytes` > 0 of zeroed memory, as a tensor of bytes. No communication.
  virtual at::Tensor allocate(int64_t bytes, c10::Device device) = 0;

  // Everything that other ranks need to map this rank's range of memory. Holds the memory until
  // they have mapped it.
  struct Export {
    // Descriptor for other processes. Empty if only threads of this process can access the memory;
    // `not_exportable_reason` is then set.
    Descriptor descriptor;
    std::string not_exportable_reason;
    uint64_t allocation_bytes = 0;  // of the whole allocation of the descriptor
    uint64_t offset = 0;            // offset in bytes of the range in the allocation
    std::string device;             // input of unreachable_reason() on another rank
    std::shared_ptr<void> keep_alive;
  };
  // Throws if the memory cannot be shared at all. `op` is for the error.
  virtual Export share(std::string_view op, const at::Tensor& tensor) = 0;

  // Returns why `device` cannot reach memory of the device that another rank's Export describes;
  // empty if it can.
  virtual std::string unreachable_reason(c10::Device device, const std::string& theirs) {
    return {};
  }
  // Returns true if that device is visible to this process, so that unreachable_reason() knows the
  // link to it. Memory of a hidden device can be mapped as well, over any kind of link.
  virtual bool sees(const std::string& theirs) { return false; }
  // Returns true if threads of one process use each other's pointers directly.
  virtual bool has_shared_address_space() const = 0;

  // Another rank's range, mapped into this process.
  struct Mapping {
    void* pointer = nullptr;
    std::shared_ptr<void> keep_alive;  // unmaps when it is destroyed
  };
  virtual Mapping map(c10::Device device, const Descriptor& descriptor, uint64_t allocation_bytes,
                      uint64_t offset) = 0;
};

// Each device type has one allocator; registering a type again replaces it.
TORCH_OVERLAP_API void register_symmetric_allocator(c10::DeviceType type,
                                                    std::shared_ptr<SymmetricAllocator> allocator);
// Throws kUnsupported, naming `op`, if the type has no allocator.
TORCH_OVERLAP_API SymmetricAllocator& symmetric_allocator(std::string_view op,
                                                          c10::DeviceType type);

// For use at namespace scope.
struct TORCH_OVERLAP_API SymmetricAllocatorRegistration {
  SymmetricAllocatorRegistration(c10::DeviceType type,
                                 std::shared_ptr<SymmetricAllocator> allocator) {
    register_symmetric_allocator(type, std::move(allocator));
  }
};

}  // namespace torch_overlap
