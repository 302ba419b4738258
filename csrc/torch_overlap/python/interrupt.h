#pragma once

namespace torch_overlap::python {

// Makes waits of the main thread run Python's signal handlers from now on.
void watch_signals();

// Sets the exception that the handler raised, for example KeyboardInterrupt, as Python's error
// again.
void restore_interrupt();

}  // namespace torch_overlap::python
