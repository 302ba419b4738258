#include "torch_overlap/base/errors.h"
#include "torch_overlap/ops/gemm_call.h"

namespace torch_overlap::ops {

GemmResults run_overlapped(const GemmCall& call) {
  TORCH_OVERLAP_CHECK(call.comm_type == 1 || call.comm_type == 2, kValue,
                      "gemm: expected comm_type to be NONE (0), RS (1) or AG (2), got ",
                      call.comm_type, ", an invalid collective type");
  fail(ErrorKind::kUnsupported, "gemm: expected comm_type NONE (0), got ", call.comm_type,
       "; use all_gather_matmul or matmul_reduce_scatter");
}

}  // namespace torch_overlap::ops
