#pragma once

#include <cuda_runtime_api.h>

namespace torch_overlap::cuda {

// Marks the end of the last of a series of operations, each of which follows the previous one
// whatever its stream. Eager operations and those of the last capture have separate events.
class LastOpEvent {
 public:
  // Creates the events on the current device.
  LastOpEvent();
  // The caller destroys the eager event, which the device may not have reached yet.
  ~LastOpEvent();
  LastOpEvent(const LastOpEvent&) = delete;
  LastOpEvent& operator=(const LastOpEvent&) = delete;

  // Makes `stream` wait for the last operation: the eager one, or the captured one if `stream` is
  // capturing.
  void make_stream_wait(cudaStream_t stream) const;
  // Records that the last operation ends with the work enqueued on `stream` so far.
  void record(cudaStream_t stream);
  cudaEvent_t eager() const { return eager_.event; }

 private:
  struct Record {
    cudaEvent_t event = nullptr;
    bool is_recorded = false;
    cudaStream_t stream = nullptr;
    unsigned long long capture = 0;
  };
  Record eager_;
  Record captured_;
};

}  // namespace torch_overlap::cuda
