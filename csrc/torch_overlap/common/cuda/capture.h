#pragma once

#include <cuda_runtime_api.h>

namespace torch_overlap::cuda {

// The CUDA graph capture that a stream is part of. `graph` is null for a stream that executes.
struct Capture {
  unsigned long long id = 0;  // unique in the process; never 0 for a capture
  cudaGraph_t graph = nullptr;

  explicit operator bool() const { return graph != nullptr; }
};

// Throws if the capture is already broken.
Capture capture_of(cudaStream_t stream);

// Makes what was captured on `side` a leaf of the graph: what `side` captures next will depend on
// what `origin` depends on now, not on what `side` did. Without this a fork that is never joined
// makes the end of the capture fail ("unjoined work"). A later wait of any stream of the capture on
// an event of `side` still adds its edge. Both streams are in one capture.
void leave_as_leaf(cudaStream_t side, cudaStream_t origin);

// Calls `on_death(argument)` once, when `graph` and all that was instantiated from it are gone, or
// before this function throws. The callback runs on a thread of the driver: it may not call CUDA,
// nor wait for anything.
void on_graph_death(cudaGraph_t graph, void (*on_death)(void*), void* argument);

// While it lives, this thread may make calls that do not touch a capture (query an event, make a
// stream) though another thread, or this one, captures in a stricter mode: they neither fail nor
// break that capture.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then: the mode to go back to
};

}  // namespace torch_overlap::cuda
