#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "torch_overlap/collectives/cuda/kernels.h"

namespace torch_overlap {

// Bulk copies need addresses that are aligned to vectors, and only this rank knows its addresses.
// Unaligned parts are copied through aligned memory in the order of `stream`, the current stream.
class AlignedParts {
 public:
  // Replaces unaligned parts of `params` by staging buffers, and copies the parts to send into
  // them.
  AlignedParts(cuda::CollectiveParams& params, cudaStream_t stream);
  // Copies the operation's results from the staging buffers to the parts.
  void copy_back() const;

 private:
  struct Copy {
    char* to;
    const char* from;
    size_t bytes;
  };
  struct StagingBuffer {
    const char* of;
    size_t bytes;
    at::Tensor memory;
  };

  char* stage_if_unaligned(const char* part, size_t bytes);
  void copy(const Copy& what) const;

  const cudaStream_t stream_;
  std::vector<StagingBuffer> staging_buffers_;
  std::vector<Copy> copies_back_;
};

}  // namespace torch_overlap
