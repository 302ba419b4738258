#pragma once

#include <ATen/core/Tensor.h>
#include <nccl.h>

#include <optional>

#include "torch_overlap/comm/backends/nccl/api.h"
#include "torch_overlap/comm/reduce_op.h"

namespace torch_overlap {

// One reduction of one dtype in NCCL's terms.
struct NativeReduction {
  ncclDataType_t dtype;
  ncclRedOp_t op;             // ncclSum for PREMUL_SUM, which NcclRedOp turns into its own
  int elements_per_item = 1;  // 2 for a complex dtype, which is reduced as pairs of reals
};

// Empty if NCCL has no such reduction, and composed.h takes over: bitwise ones, the logical xor of
// bool, 16-bit integers and uncommon dtypes. fp8 too: NCCL would round to 8 bits at every hop, and
// needs sm_90 on all ranks.
//
// The answer depends on dtype and operation alone, so that all ranks take the same way.
TORCH_OVERLAP_API std::optional<NativeReduction> native_reduction(at::ScalarType dtype,
                                                                  const ReduceOp& op);
// The same for reductions that NCCL itself shall do. Also empty for MIN and MAX of floats, of which
// NCCL drops a NaN that only some ranks have: a NaN propagates, as in torch.maximum().
TORCH_OVERLAP_API std::optional<NativeReduction> nccl_reduction(at::ScalarType dtype,
                                                                const ReduceOp& op);

// The handle of a reduction for one call: NCCL's own operator, or for PREMUL_SUM one that is made
// and destroyed here. NCCL lets it go as soon as the calls that use it have returned, groups
// included.
class NcclRedOp {
 public:
  NcclRedOp(const NcclApi& api, ncclComm_t comm, const NativeReduction& native, const ReduceOp& op);
  ~NcclRedOp();
  NcclRedOp(const NcclRedOp&) = delete;
  NcclRedOp& operator=(const NcclRedOp&) = delete;

  ncclRedOp_t get() const { return op_; }

 private:
  const NcclApi& api_;
  ncclComm_t comm_;
  ncclRedOp_t op_;
  bool owned_ = false;
};

}  // namespace torch_overlap
