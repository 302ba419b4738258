#pragma once

#include <cuda_runtime_api.h>

namespace torch_overlap::cuda {

// The CUDA graph capture that a stream is part of. `graph` is null for a stream that executes.
struct Capture {
  unsigned long long id = 0;  // unique in the process; never 0 for a capture
  cudaGraph_t graph = nullptr;

  explicit operator bool() const { return graph != nullptr; }
};

// Throws if the capture is already invalid.
Capture capture_of(cudaStream_t stream);

// Makes the work captured on `side` a leaf of the graph: the next work on `side` will depend on
// what `origin` depends on now, not on the work of `side`. Without this, a fork that is never
// joined makes the end of the capture fail ("unjoined work"). A later wait of any stream of the
// capture on an event of `side` still adds its edge. Both streams must be in one capture.
void reset_capture_dependencies(cudaStream_t side, cudaStream_t origin);

// Calls `on_destroyed(argument)` once, when `graph` and everything instantiated from it is
// destroyed, or before this function throws. The callback runs on a thread of the driver: it must
// neither call CUDA nor wait.
void on_graph_destroyed(cudaGraph_t graph, void (*on_destroyed)(void*), void* argument);

// While it exists, this thread may make calls that do not affect a capture (query an event, create
// a stream), even if another thread, or this one, captures in a stricter mode. They neither fail
// nor invalidate that capture.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then: the mode to restore
};

}  // namespace torch_overlap::cuda
