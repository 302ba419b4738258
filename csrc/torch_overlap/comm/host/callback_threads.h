#pragma once

#include <functional>

namespace torch_overlap {

// Runs completion callbacks, which are the user's code, on threads of their own: a callback may
// issue operations of any communicator and wait for them, and for futures that other callbacks
// complete.
//
// Callbacks start in the order of these calls. One that has run for a millisecond no longer holds
// up the next, which gets another thread; a thread without work ends after some seconds.
//
// Threads: any may call. The callback must not throw. The process waits for queued callbacks before
// it ends (shutdown.h); a callback that comes later is dropped.
void run_callback(std::function<void()> callback);

}  // namespace torch_overlap
