#include "torch_overlap/gemm/cublaslt/cache.h"

namespace torch_overlap::cublaslt {
namespace {

// Limits host memory: a plan takes a few KiB. The cache is cleared if more shapes occur.
constexpr size_t kMaxPlans = 8192;

}  // namespace

PlanCache& PlanCache::instance() {
  static auto* const cache = new PlanCache;
  return *cache;
}

std::shared_ptr<Plan> PlanCache::plan_of(cublasLtHandle_t handle, const LtMatmulArgs& call) {
  {
    const std::shared_lock lock(mutex_);
    const auto found = plans_.find(call.key);
    if (found != plans_.end()) return found->second;
  }
  // The lock is held, so that concurrent calls with one key create one plan.
  const std::unique_lock lock(mutex_);
  const auto found = plans_.find(call.key);
  if (found != plans_.end()) return found->second;
  auto made = std::make_shared<Plan>(handle, call);
  if (plans_.size() >= kMaxPlans) plans_.clear();
  plans_.emplace(call.key, made);
  return made;
}

}  // namespace torch_overlap::cublaslt
