#pragma once

#include "torch_overlap/overlap/cuda/direct.h"
#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/transport.h"
#include "torch_overlap/overlap/direct.h"

namespace torch_overlap::cuda {

// What kernels that are operations by themselves begin and end with.
OperationParams operation_of(const CudaTransport& transport, const Begin& operation);

// The same for products that send by themselves, of at most kMostFusedRanks ranks.
BegunWords begun_words(const CudaTransport& transport);

// Whether the kernel takes such a sum; by what all ranks have alike.
bool has_direct_kernel(const DirectSum& sum);

// On the current stream: operations of the transport's channel by themselves.
void run_direct(CudaTransport& transport, const DirectSum& sum);
void run_direct(CudaTransport& transport, const DirectGather& gather);

}  // namespace torch_overlap::cuda
