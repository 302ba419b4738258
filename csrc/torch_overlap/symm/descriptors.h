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

// Which memory of which process a rank can get at all: equal `system` (one running kernel) and
// `network` (one network namespace, where the sockets below meet) mean that descriptors can be
// passed; equal `process` too, that pointers can.
struct TORCH_OVERLAP_API Place {
  std::string system;
  std::string network;
  std::string process;

  static const Place& here();
  // Why descriptors cannot be passed to `other`; empty if they can.
  std::string obstacle_to(const Place& other) const;
};

// Passes file descriptors among the processes of one host, each rank's to every other rank. A
// descriptor is the one name of memory that needs no file: nothing stays in /dev/shm or /tmp when a
// process is killed, no limit of a mount counts, and what CUDA exports travels the same way, which
// /proc/<pid>/fd cannot open and pidfd_getfd may not.
//
// Each rank listens under a random name in the abstract socket namespace, which vanishes with the
// socket, and tells it to the others. Only processes of this user that know a rank's name and its
// token are listened to.
class TORCH_OVERLAP_API DescriptorExchange {
 public:
  DescriptorExchange();
  // What the other ranks must know.
  const std::string& name() const { return name_; }

  // Collective over the ranks with a name: sends `mine` to each, and gets each one's. names[rank]
  // is empty for a rank that takes no part. A rank whose descriptors did not come by the deadline
  // has `fault` set instead; `is_late` says that nothing is known to keep them from coming, as
  // where the rank has died.
  struct Received {
    std::vector<Descriptor> descriptors;
    std::string fault;
    bool is_late = false;
  };
  std::vector<Received> run(int rank, const std::vector<std::string>& names,
                            const std::vector<int>& mine,
                            std::chrono::steady_clock::time_point deadline);

 private:
  // Takes one connection; which rank it is of, or nothing if it is not one that is expected.
  std::optional<int> take(Descriptor connection, std::vector<Received>& received,
                          std::chrono::steady_clock::time_point deadline) const;

  std::string name_;
  Descriptor listener_;
};

}  // namespace torch_overlap
