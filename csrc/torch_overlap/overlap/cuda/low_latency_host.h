#pragma once

#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/low_latency.h"
#include "torch_overlap/overlap/cuda/transport.h"
#include "torch_overlap/overlap/low_latency.h"

namespace torch_overlap::cuda {

// Returns the parameters with which a kernel that is an operation by itself begins and ends.
OperationParams operation_of(const CudaTransport& transport, const EntryPayload& operation);

// Returns the entry flags for products that send by themselves, on at most kMaxFusedRanks ranks.
EntryFlags entry_flags(const CudaTransport& transport);

// True if there is a kernel for this sum. Depends only on values that are the same on all ranks.
bool has_low_latency_kernel(const LowLatencySum& sum);

// Launch on the current stream. Each is an operation of the transport's channel by itself.
void run_low_latency(CudaTransport& transport, const LowLatencySum& sum);
void run_low_latency(CudaTransport& transport, const LowLatencyGather& gather);

}  // namespace torch_overlap::cuda
