#pragma once

#include <ATen/core/Tensor.h>
#include <nccl.h>

#include <optional>

#include "torch_overlap/comm/backends/nccl/api.h"
#include "torch_overlap/comm/reduce_op.h"

namespace torch_overlap {

// A reduction of one dtype in NCCL's terms.
struct NativeReduction {
  ncclDataType_t dtype;
  ncclRedOp_t op;             // ncclSum for PREMUL_SUM, which NcclRedOp replaces by its own
  int elements_per_item = 1;  // 2 for a complex dtype, which is reduced as pairs of reals
};

// Returns an empty value if NCCL has no such reduction, and composed.h takes over: bitwise ones,
// the logical xor of bool, 16-bit integers and uncommon dtypes. Also for fp8: NCCL would round to 8
// bits at every hop, and needs sm_90 on all ranks.
//
// The result depends only on dtype and operation, so that all ranks use the same implementation.
TORCH_OVERLAP_API std::optional<NativeReduction> native_reduction(at::ScalarType dtype,
                                                                  const ReduceOp& op);
// Returns the same for reductions that NCCL itself runs in a group of `size` ranks. Also empty for
// - MIN and MAX of floats: NCCL drops a NaN that only some ranks have, but it must propagate, as in
//   torch.maximum();
// - PREMUL_SUM on one rank: NCCL (2.28.9) leaves the last elements unchanged if they are not
//   divisible by the number of its blocks. AVG would, too: it is a sum there, which NCCL copies.
TORCH_OVERLAP_API std::optional<NativeReduction> nccl_reduction(at::ScalarType dtype,
                                                                const ReduceOp& op, int size);

// The operator of a reduction for one call: a predefined one or, for PREMUL_SUM, one that is
// created and destroyed here. NCCL allows that as soon as the calls that use it have returned,
// groups included.
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
