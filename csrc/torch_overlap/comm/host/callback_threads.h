#pragma once

#include <functional>

namespace torch_overlap {

// Runs a completion callback on a background thread. Callbacks are user code: one may issue
// operations of any communicator, and may wait for them and for futures that other callbacks
// complete.
//
// Callbacks start in the order of these calls. A callback that runs for longer than a millisecond
// no longer delays the next one, which gets another thread. An idle thread ends after some seconds.
//
// Thread-safe. The callback must not throw. Process exit waits for queued callbacks (shutdown.h); a
// callback that is queued later is dropped.
void run_callback(std::function<void()> callback);

}  // namespace torch_overlap
