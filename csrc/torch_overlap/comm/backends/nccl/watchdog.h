#pragma once

#include <memory>

namespace torch_overlap {

// An object that the watchdog polls.
class Watched {
 public:
  virtual ~Watched() = default;
  // Called on the watchdog's thread. Must not wait for anything that another thread could hold for
  // long, and so must not release a tensor (deferred_deleter.h). The same holds for the destructor,
  // if the watchdog drops the last reference.
  virtual void tick() noexcept = 0;
};

// Adds an object to the watchdog, one thread for all communicators of the process. It calls tick()
// periodically for as long as the object lives.
void watch(std::weak_ptr<Watched> watched);

}  // namespace torch_overlap
