#pragma once

#include <cuda_runtime_api.h>

namespace torch_overlap::cuda {

// Where the last of operations ends of which each comes behind the one before, whatever stream it
// is on: of eager ones, and of those of the last capture.
class Ends {
 public:
  // On the current device.
  Ends();
  // The caller ends the eager one's event, which the device may not have come to.
  ~Ends();
  Ends(const Ends&) = delete;
  Ends& operator=(const Ends&) = delete;

  // `stream` comes behind the last one, as one that executes, or that is captured.
  void put_behind(cudaStream_t stream) const;
  // The last one ends with what is on `stream` now.
  void record(cudaStream_t stream);
  cudaEvent_t eager() const { return eager_.event; }

 private:
  struct End {
    cudaEvent_t event = nullptr;
    bool is_recorded = false;
    cudaStream_t stream = nullptr;
    unsigned long long capture = 0;
  };
  End eager_;
  End captured_;
};

}  // namespace torch_overlap::cuda
