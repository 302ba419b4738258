#pragma once

#include <cuda_runtime_api.h>

// CUDA calls whose signature depends on the version, with the signature of CUDA 13.
namespace torch_overlap::cuda::compat {

inline cudaError_t stream_capture_info(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                       unsigned long long* id, cudaGraph_t* graph,
                                       const cudaGraphNode_t** nodes,
                                       const cudaGraphEdgeData** edges, size_t* count) {
#if CUDART_VERSION >= 13000
  return cudaStreamGetCaptureInfo(stream, status, id, graph, nodes, edges, count);
#else
  return cudaStreamGetCaptureInfo_v3(stream, status, id, graph, nodes, edges, count);
#endif
}

inline cudaError_t stream_set_capture_dependencies(cudaStream_t stream,
                                                   const cudaGraphNode_t* nodes,
                                                   const cudaGraphEdgeData* edges, size_t count) {
  auto* mutable_nodes = const_cast<cudaGraphNode_t*>(nodes);  // read only, despite the type
#if CUDART_VERSION >= 13000
  return cudaStreamUpdateCaptureDependencies(stream, mutable_nodes, edges, count,
                                             cudaStreamSetCaptureDependencies);
#else
  return cudaStreamUpdateCaptureDependencies_v2(stream, mutable_nodes, edges, count,
                                                cudaStreamSetCaptureDependencies);
#endif
}

}  // namespace torch_overlap::cuda::compat
