#pragma once

namespace torch_overlap::python {

// Waits of the main thread run Python's handlers of signals from now on.
void watch_signals();

// Sets what the handler raised, KeyboardInterrupt for example, as Python's error again.
void restore_interrupt();

}  // namespace torch_overlap::python
