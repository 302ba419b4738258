#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <memory>
#include <string>

#include "torch_overlap/base/export.h"
#include "torch_overlap/symm/descriptors.h"

namespace torch_overlap {

// Memory that other ranks can map, of one kind of device. A folder a kind (host/, cuda/), which
// registers itself: what is built decides what there is.
//
// Threads: any.
class TORCH_OVERLAP_API SymmetricAllocator {
 public:
  virtual ~SymmetricAllocator() = default;

  // Throws if the calling thread's current stream of such a device is being captured in a graph:
  // memory is neither made nor mapped there. `op` is for the error.
  virtual void refuse_capture(std::string_view op) const {}

  // `bytes` > 0 of memory, all zero, as a tensor of bytes. No communication.
  virtual at::Tensor allocate(int64_t bytes, c10::Device device) = 0;

  // What others need to map this rank's range of memory. It holds the memory until the others have.
  struct Export {
    // One for other processes; empty where only threads of this process can have it, as `only_here`
    // then says.
    Descriptor descriptor;
    std::string only_here;
    uint64_t allocation_bytes = 0;  // of all that the descriptor stands for
    uint64_t offset = 0;            // of the range in it
    std::string device;             // what obstacle() on another rank needs to know
    std::shared_ptr<void> keeper;
  };
  // Throws where the memory cannot be shared at all. `op` is for the error.
  virtual Export share(std::string_view op, const at::Tensor& tensor) = 0;

  // Why `device` cannot reach memory of the device that another rank's Export describes; empty if
  // it can.
  virtual std::string obstacle(c10::Device device, const std::string& theirs) { return {}; }
  // Whether this process sees that device, and so obstacle() the link to it: what is hidden can be
  // mapped as well, over whatever it may be.
  virtual bool sees(const std::string& theirs) { return false; }
  // Whether threads of one process use each other's pointers as they are.
  virtual bool shares_pointers() const = 0;

  // Another rank's range in this process.
  struct Mapping {
    void* pointer = nullptr;
    std::shared_ptr<void> keeper;  // its end unmaps
  };
  virtual Mapping map(c10::Device device, const Descriptor& descriptor, uint64_t allocation_bytes,
                      uint64_t offset) = 0;
};

// One for each kind of device; registering twice replaces it.
TORCH_OVERLAP_API void register_symmetric_allocator(c10::DeviceType type,
                                                    std::shared_ptr<SymmetricAllocator> allocator);
// Throws kUnsupported, naming `op`, where there is none.
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
