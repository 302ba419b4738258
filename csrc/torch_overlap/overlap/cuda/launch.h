#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>

// Launch helpers shared by the .cu files.
namespace torch_overlap::cuda {

// Launches a kernel with clusters of `cluster` blocks; 1 launches it without clusters.
inline cudaError_t launch_with_cluster(const void* kernel, dim3 grid, dim3 block, int cluster,
                                       void** arguments, cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned int>(cluster);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

// Loads the code of the kernels onto the current device.
inline cudaError_t load_kernels(std::initializer_list<const void*> kernels) {
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace torch_overlap::cuda
