#pragma once

#include <chrono>
#include <functional>

namespace torch_overlap {

// Runs `work` on a thread of its own and waits for it, at most `limit`. True: it ended; what it
// threw is thrown here. False: it goes on alone, and what it throws is lost. So `work` owns all it
// touches. For calls that can hang with no way to give them a timeout.
bool run_bounded(std::function<void()> work, std::chrono::milliseconds limit);

}  // namespace torch_overlap
