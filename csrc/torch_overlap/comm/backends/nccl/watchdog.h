#pragma once

#include <memory>

namespace torch_overlap {

class NcclBackend;

// Adds a backend to the watchdog, one thread for all communicators of the process. It calls tick()
// periodically for as long as the backend lives.
void watch(std::weak_ptr<NcclBackend> backend);

}  // namespace torch_overlap
