#include "torch_overlap/gemm/cublaslt/cache.h"

namespace torch_overlap::cublaslt {
namespace {

// A plan takes a few KiB of host memory. Programs whose shapes never repeat begin anew.
constexpr size_t kMostPlans = 8192;

}  // namespace

PlanCache& PlanCache::instance() {
  static auto* const cache = new PlanCache;
  return *cache;
}

std::shared_ptr<Plan> PlanCache::plan_of(cublasLtHandle_t handle, const LtCall& call) {
  {
    const std::shared_lock lock(mutex_);
    const auto found = plans_.find(call.key);
    if (found != plans_.end()) return found->second;
  }
  // Under the lock, so that threads which come together make one plan.
  const std::unique_lock lock(mutex_);
  const auto found = plans_.find(call.key);
  if (found != plans_.end()) return found->second;
  auto made = std::make_shared<Plan>(handle, call);
  if (plans_.size() >= kMostPlans) plans_.clear();
  plans_.emplace(call.key, made);
  return made;
}

}  // namespace torch_overlap::cublaslt
