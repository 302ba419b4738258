#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"
#include "torch_overlap/symm/allocator.h"

namespace torch_overlap {
namespace {

// Anonymous memory with a descriptor (memfd). It has no name in any file system, so it is freed
// when the last process that maps it ends, however that process ends. The size of /dev/shm, 64 MiB
// in many containers, does not limit it, as it would limit POSIX shared memory.
class HostAllocation {
 public:
  explicit HostAllocation(uint64_t bytes)
      : bytes_(bytes), descriptor_(memfd_create("torch_overlap", MFD_CLOEXEC)) {
    check(static_cast<bool>(descriptor_), "a descriptor");
    // More than the machine has would not fail below: it would end processes of this machine.
    const auto most = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                      static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    TORCH_OVERLAP_CHECK(bytes <= most, kRuntime, "symmetric_empty: expected at most the ", most,
                        " bytes of memory of this machine, got ", bytes);
    // Allocates now, so that insufficient memory is an error here and not a signal at the first
    // write.
    int result = 0;
    do {
      result = posix_fallocate(descriptor_.get(), 0, static_cast<off_t>(bytes));
    } while (result == EINTR);
    errno = result;
    check(result == 0, "memory");
    pointer_ = map(descriptor_, bytes);
  }
  ~HostAllocation() { (void)munmap(pointer_, bytes_); }
  HostAllocation(const HostAllocation&) = delete;
  HostAllocation& operator=(const HostAllocation&) = delete;

  static void* map(const Descriptor& descriptor, uint64_t bytes) {
    void* pointer =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), /*offset=*/0);
    TORCH_OVERLAP_CHECK(pointer != MAP_FAILED, kRuntime, "expected to map ", bytes,
                        " bytes of shared memory, got: ", std::strerror(errno));
    return pointer;
  }

  std::byte* begin() const { return static_cast<std::byte*>(pointer_); }
  uint64_t bytes() const { return bytes_; }
  Descriptor duplicate() const {
    Descriptor copy(fcntl(descriptor_.get(), F_DUPFD_CLOEXEC, 0));
    check(static_cast<bool>(copy), "a descriptor");
    return copy;
  }

 private:
  void check(bool ok, const char* what) const {
    TORCH_OVERLAP_CHECK(ok, kRuntime, "symmetric_empty: expected ", what, " for ", bytes_,
                        " bytes that ranks share, got: ", std::strerror(errno));
  }

  const uint64_t bytes_;
  Descriptor descriptor_;
  void* pointer_ = nullptr;
};

// All live allocations by address, to find the allocation that contains a tensor.
struct Allocations {
  ForkSafeMutex mutex;
  std::map<const std::byte*, std::weak_ptr<HostAllocation>> by_address;
};

Allocations& allocations() { return LeakySingleton<Allocations>::get(); }

std::shared_ptr<HostAllocation> make_allocation(uint64_t bytes) {
  std::shared_ptr<HostAllocation> made(new HostAllocation(bytes), [](HostAllocation* dead) {
    const std::unique_ptr<HostAllocation> owner(dead);  // unmapped once it cannot be found any more
    const std::lock_guard lock(allocations().mutex);
    allocations().by_address.erase(dead->begin());
  });
  const std::lock_guard lock(allocations().mutex);
  allocations().by_address.insert_or_assign(made->begin(), made);
  return made;
}

std::shared_ptr<HostAllocation> find_allocation(const std::byte* begin, uint64_t bytes) {
  std::shared_ptr<HostAllocation> found;
  const std::lock_guard lock(allocations().mutex);
  auto after = allocations().by_address.upper_bound(begin);
  if (after == allocations().by_address.begin()) return nullptr;
  found = std::prev(after)->second.lock();
  if (!found || begin + bytes > found->begin() + found->bytes()) return nullptr;
  return found;
}

class HostAllocator final : public SymmetricAllocator {
 public:
  at::Tensor allocate(int64_t bytes, c10::Device device) override {
    auto allocation = make_allocation(static_cast<uint64_t>(bytes));
    void* pointer = allocation->begin();
    return at::from_blob(
        pointer, {bytes}, [kept = std::move(allocation)](void*) mutable { kept.reset(); },
        at::kByte);
  }

  Export share(std::string_view op, const at::Tensor& tensor) override {
    const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
    Export shared;
    if (const auto allocation = find_allocation(begin, tensor.nbytes())) {
      shared.descriptor = allocation->duplicate();
      shared.allocation_bytes = allocation->bytes();
      shared.offset = static_cast<uint64_t>(begin - allocation->begin());
      shared.keep_alive = allocation;
    } else {
      shared.not_exportable_reason =
          "private to its process; make the tensor with torch_overlap.symmetric_empty";
      shared.keep_alive = std::make_shared<at::Tensor>(tensor);
    }
    return shared;
  }

  bool has_shared_address_space() const override { return true; }

  Mapping map(c10::Device, const Descriptor& descriptor, uint64_t allocation_bytes,
              uint64_t offset) override {
    void* base = HostAllocation::map(descriptor, allocation_bytes);
    return {static_cast<std::byte*>(base) + offset,
            std::shared_ptr<void>(base, [allocation_bytes](void* pointer) {
              (void)munmap(pointer, allocation_bytes);
            })};
  }
};

const SymmetricAllocatorRegistration host_registration(c10::kCPU,
                                                       std::make_shared<HostAllocator>());

}  // namespace
}  // namespace torch_overlap
