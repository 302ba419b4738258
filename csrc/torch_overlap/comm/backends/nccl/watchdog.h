#pragma once

#include <memory>

namespace torch_overlap {

// Something that wants to be looked at now and then.
class Watched {
 public:
  virtual ~Watched() = default;
  // On the watchdog's thread. May not wait for anything that another thread could hold for long, so
  // it drops no tensor (graveyard.h), nor does the end of its last reference.
  virtual void tick() noexcept = 0;
};

// One thread for all communicators of the process; calls each one's tick() every kWatchdogPeriod
// for as long as it lives.
void watch(std::weak_ptr<Watched> watched);

}  // namespace torch_overlap
