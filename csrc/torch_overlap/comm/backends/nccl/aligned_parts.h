#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <vector>

#include "torch_overlap/comm/backends/nccl/direct_kernels.h"

namespace torch_overlap {

// Bulk copies want places that are aligned to vectors, and whether they are only this rank knows.
// What is not passes through memory that is, in the order of `stream`, which is the current one.
class AlignedParts {
 public:
  // Puts others in the place of the parts that are not, with what is to be sent.
  AlignedParts(cuda::DirectParams& params, cudaStream_t stream);
  // Of what the operation has written.
  void copy_back() const;

 private:
  struct Copy {
    char* to;
    const char* from;
    size_t bytes;
  };
  struct StandIn {
    const char* of;
    size_t bytes;
    at::Tensor memory;
  };

  char* stand_in(const char* part, size_t bytes);
  void copy(const Copy& what) const;

  const cudaStream_t stream_;
  std::vector<StandIn> others_;
  std::vector<Copy> back_;
};

}  // namespace torch_overlap
