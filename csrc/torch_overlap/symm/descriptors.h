#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Owns a file descriptor.
class TORCH_OVERLAP_API Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();

  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

// Identifies the memory that a rank can reach at all. Descriptors can be passed if `system` (one
// running kernel) and `network` (one network namespace, in which the sockets below connect) are
// equal. Pointers can be passed if `process` is equal, too.
struct TORCH_OVERLAP_API ProcessIdentity {
  std::string system;
  std::string network;
  std::string process;

  static const ProcessIdentity& current();
  // Returns why descriptors cannot be passed to `other`; empty if they can.
  std::string unreachable_reason(const ProcessIdentity& other) const;
};

// Passes file descriptors among the processes of one host, from each rank to every other rank. A
// descriptor refers to memory without a file: nothing stays in /dev/shm or /tmp if a process is
// killed, and the size limit of a mount does not apply. Memory that CUDA exports travels the same
// way; /proc/<pid>/fd cannot open it, and pidfd_getfd may not be permitted.
//
// Each rank listens under a random name in the abstract socket namespace, which disappears with the
// socket, and sends the name to the others. Connections are accepted only from processes of this
// user that know the rank's name.
class TORCH_OVERLAP_API DescriptorExchange {
 public:
  DescriptorExchange();
  // Name that the other ranks must know.
  const std::string& name() const { return name_; }

  // Collective over the ranks with a name: sends `mine` to each, and receives each one's.
  // names[rank] is empty for a rank that does not take part. If a rank's descriptors did not arrive
  // by the deadline, `fault` is set instead. `is_late` is set if no reason for that is known, for
  // example if the rank has died.
  struct Received {
    std::vector<Descriptor> descriptors;
    std::string fault;
    bool is_late = false;
  };
  std::vector<Received> run(int rank, const std::vector<std::string>& names,
                            const std::vector<int>& mine,
                            std::chrono::steady_clock::time_point deadline);

 private:
  // Accepts one connection. Returns its rank, or nothing if it is not an expected one.
  std::optional<int> take(Descriptor connection, std::vector<Received>& received,
                          std::chrono::steady_clock::time_point deadline) const;

  std::string name_;
  Descriptor listener_;
};

}  // namespace torch_overlap
