#include "torch_overlap/gemm/gemm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/gemm/aliasing.h"
#include "torch_overlap/gemm/checked_gemm.h"
#include "torch_overlap/gemm/counters.h"
#include "torch_overlap/gemm/epilogue.h"
#include "torch_overlap/gemm/grouped.h"
#include "torch_overlap/gemm/validate.h"

namespace torch_overlap {
namespace {

// Handles empty products. The epilogue may still have work, including sums over no rows.
bool finish_empty(const GemmProblem& problem) {
  const auto [m, n, k] = problem.shape;
  if (m != 0 && n != 0 && k != 0) return false;
  const auto type = problem.args.out.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const c10::DeviceGuard guard(problem.args.out.device());
  compute_unfused_bias_grad(problem);
  apply_unfused_epilogue(problem, at::zeros({m, n}, problem.args.out.options().dtype(type)));
  return true;
}

void run_checked(GemmBackend& backend, const GemmProblem& problem) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  if (finish_empty(problem)) return;
  count(gemm_counters().calls);
  const c10::DeviceGuard guard(problem.args.out.device());
  backend.run(problem);
}

}  // namespace

GemmShape gemm_shape(const GemmArgs& args) {
  const auto& lhs = args.lhs;
  const auto& rhs = args.rhs;
  return {.m = lhs.data.size(lhs.transposed ? 1 : 0),
          .n = rhs.data.size(rhs.transposed ? 0 : 1),
          .k = lhs.data.size(lhs.transposed ? 0 : 1)};
}

void gemm(std::string_view op, const GemmArgs& args) {
  const GemmProblem problem = checked_problem(op, args);
  GemmBackend& backend = gemm_backend(op, args.out.device().type());
  backend.check(problem);
  run_checked(backend, problem);
}

CheckedGemm::CheckedGemm(std::string_view op, GemmArgs args) : op_(op), args_(std::move(args)) {
  GemmProblem problem = checked_problem(op_, args_);
  GemmBackend& backend = gemm_backend(op_, args_.out.device().type());
  backend.check(problem);
  starts_early_ = args_.early_start != EarlyStart::none && backend.load_early(problem);
  shape_ = problem.shape;
  lhs_ = std::move(problem.lhs);
  rhs_ = std::move(problem.rhs);
}

void CheckedGemm::run() const {
  run_checked(gemm_backend(op_, args_.out.device().type()),
              {.op = op_, .args = args_, .shape = shape_, .lhs = lhs_, .rhs = rhs_});
}

std::vector<std::string> custom_gemm_kernels(std::string_view op, const GemmArgs& args) {
  const GemmProblem problem = checked_problem(op, args);
  const c10::DeviceGuard guard(args.out.device());
  return gemm_backend(op, args.out.device().type()).custom_kernels(problem);
}

void run_custom_gemm_kernel(std::string_view op, const GemmArgs& args, std::string_view kernel) {
  const GemmProblem problem = checked_problem(op, args);
  GemmBackend& backend = gemm_backend(op, args.out.device().type());
  const c10::DeviceGuard guard(args.out.device());
  const auto known = backend.custom_kernels(problem);
  const auto found = std::find(known.begin(), known.end(), kernel);
  std::string names;
  for (const auto& name : known) names += concat(names.empty() ? "" : ", ", name);
  TORCH_OVERLAP_CHECK(found != known.end(), kUnsupported, op, ": expected one of our kernels (",
                      names.empty() ? "none takes this product" : names, "), got ", kernel);
  backend.run_custom(problem, static_cast<size_t>(found - known.begin()));
}

void check_gemm(std::string_view op, const GemmArgs& args) {
  const GemmProblem problem = checked_problem(op, args);
  gemm_backend(op, args.out.device().type()).check(problem);
}

void grouped_gemm(std::string_view op, const std::vector<GemmArgs>& group) {
  if (group.empty()) return;
  std::vector<GemmProblem> problems;
  problems.reserve(group.size());
  for (const auto& args : group) {
    problems.push_back(checked_problem(op, args));
    TORCH_OVERLAP_CHECK(args.out.device() == group[0].out.device(), kType, op,
                        ": expected one device for the group, got ", group[0].out.device(), " and ",
                        args.out.device(), "; make a group of each device");
  }
  check_no_aliasing_in_group(op, problems);
  const auto device = group[0].out.device();
  GemmBackend& backend = gemm_backend(op, device.type());
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  std::vector<GemmProblem> products;
  for (const auto& problem : problems) backend.check(problem);
  for (const auto& problem : problems) {
    if (finish_empty(problem)) continue;
    count(gemm_counters().calls);
    products.push_back(problem);
  }
  const c10::DeviceGuard guard(device);
  backend.run_group(products);
}

}  // namespace torch_overlap
