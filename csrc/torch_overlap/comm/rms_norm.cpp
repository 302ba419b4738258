#include "torch_overlap/comm/rms_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/rms_norm.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/below_dispatch_guard.h"
#include "torch_overlap/comm/torch_comm.h"
#include "torch_overlap/comm/validate.h"

namespace torch_overlap {
namespace {

void check_rms_norm(const Checker& check, const at::Tensor& tensor, const RmsNorm& norm) {
  check.tensor(tensor, "tensor");
  const auto dtype = tensor.scalar_type();
  TORCH_OVERLAP_CHECK(at::isFloatingType(dtype) && tensor.element_size() >= 2, kType, check.op,
                      ": expected float16, bfloat16, float32 or float64, got ", dtype);
  TORCH_OVERLAP_CHECK(tensor.dim() >= 1, kValue, check.op,
                      ": expected a tensor whose last dimension is a row to normalize, got sizes ",
                      tensor.sizes());
  const auto same_shape = [&](const at::Tensor& other, std::string_view what) {
    check.tensor_like(other, tensor, what);
    TORCH_OVERLAP_CHECK(other.sizes() == tensor.sizes(), kValue, check.op, ": expected ", what,
                        " of sizes ", tensor.sizes(), ", those of the tensor, got ", other.sizes());
  };
  const auto row = [&](const at::Tensor& other, std::string_view what) {
    check.tensor_like(other, tensor, what);
    TORCH_OVERLAP_CHECK(other.dim() == 1 && other.size(0) == tensor.size(-1), kValue, check.op,
                        ": expected ", what, " of sizes [", tensor.size(-1),
                        "], one for each element of a row, got ", other.sizes());
  };
  same_shape(norm.residual, "residual");
  same_shape(norm.residual_out, "residual_out");
  row(norm.weight, "weight");
  if (norm.bias.defined()) row(norm.bias, "bias");
  TORCH_OVERLAP_CHECK(norm.eps >= 0, kValue, check.op, ": expected eps >= 0, got ", norm.eps);
  for (const auto& [written, what] :
       {std::pair(tensor, "the tensor"), std::pair(norm.residual_out, "residual_out")}) {
    check.no_overlap(norm.weight, written, false, what);
    if (norm.bias.defined()) check.no_overlap(norm.bias, written, false, what);
  }
  if (norm.terms.defined()) {
    same_shape(norm.terms, "terms");
    check.no_overlap(norm.terms, tensor, false, "the tensor");
    check.no_overlap(norm.terms, norm.residual_out, false, "residual_out");
  }
  TORCH_OVERLAP_CHECK(norm.quantization.scaling == NormScaling::none ||
                          check.members->backend->quantizes_rms_norm(dtype, norm.weight.nbytes()),
                      kUnsupported, check.op, ": expected rows that the backend quantizes, got ",
                      dtype, " rows of ", norm.weight.numel(),
                      " elements. Ask quantizes_rms_norm() first.");
  check.no_overlap(tensor, norm.residual_out, false, "residual_out");
  check.no_overlap(tensor, norm.residual, false, "residual");
  check.no_overlap(norm.residual, norm.residual_out, true, "residual_out");
}

}  // namespace

void add_rms_norm(const at::Tensor& sum, const RmsNorm& norm) {
  const at::NoGradGuard no_grad;
  const BelowDispatchGuard plain;
  const auto wide = sum.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto hidden = norm.residual.to(wide) + sum.to(wide);
  if (norm.bias.defined()) hidden += norm.bias.to(wide);
  norm.residual_out.copy_(hidden);
  sum.copy_(at::rms_norm(norm.residual_out, norm.weight.sizes(), norm.weight, norm.eps));
}

namespace {

Call norm_call(const at::Tensor& tensor, const RmsNorm& norm) {
  Call call;
  call.name = OpName::all_reduce_rms_norm;
  call.primitive = Primitive::all_reduce;
  call.tensor = tensor;
  call.reduce_op = ReduceOp(RedOpType::SUM);
  call.norm = std::make_shared<const RmsNorm>(norm);
  return call;
}

}  // namespace

WorkPtr TorchComm::all_reduce_rms_norm(const Tensor& tensor, const RmsNorm& norm,
                                       const OpOptions& options) {
  const Checker check = checker("all_reduce_rms_norm");
  check_rms_norm(check, tensor, norm);
  if (!check.members->backend->has_rms_norm()) {
    if (norm.terms.defined()) tensor.copy_(norm.terms);
    auto work = all_reduce(tensor, ReduceOp(RedOpType::SUM), /*async_op=*/false, options);
    torch_overlap::add_rms_norm(tensor, norm);
    return work;
  }
  return issue(check, norm_call(tensor, norm), /*async_op=*/false, options);
}

bool TorchComm::quantizes_rms_norm(const Tensor& tensor) const {
  const Checker check = checker("all_reduce_rms_norm");
  return check.members->backend->quantizes_rms_norm(
      tensor.scalar_type(), static_cast<size_t>(tensor.size(-1)) * tensor.element_size());
}

NormKernel TorchComm::rms_norm_kernel(const Tensor& tensor, const RmsNorm& norm) const {
  const Checker check = checker("all_reduce_rms_norm");
  Call call = norm_call(tensor, norm);
  call.custom_collectives = check.members->context.options.custom_collectives;
  return check.members->backend->rms_norm_kernel(call);
}

void TorchComm::add_rms_norm(const Tensor& sum, const RmsNorm& norm) {
  const Checker check = checker("add_rms_norm");
  check_rms_norm(check, sum, norm);
  check.members->backend->run_rms_norm(norm_call(sum, norm));
}

}  // namespace torch_overlap
