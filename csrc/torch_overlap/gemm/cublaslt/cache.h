#pragma once

#include <memory>
#include <shared_mutex>
#include <unordered_map>

#include "torch_overlap/gemm/cublaslt/plan.h"

namespace torch_overlap::cublaslt {

// All plans of the process. A call with a known key creates no descriptors and makes no heuristic
// query. Thread-safe.
class PlanCache {
 public:
  // Never destroyed, because cuBLASLt may be unloaded first.
  static PlanCache& instance();

  std::shared_ptr<Plan> plan_of(cublasLtHandle_t handle, const LtMatmulArgs& call);

 private:
  std::shared_mutex mutex_;
  std::unordered_map<PlanKey, std::shared_ptr<Plan>, PlanKeyHash> plans_;
};

}  // namespace torch_overlap::cublaslt
