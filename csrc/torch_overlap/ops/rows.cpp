#include "torch_overlap/ops/rows.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <utility>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/common/views.h"
#include "torch_overlap/gemm/operand.h"
#include "torch_overlap/ops/checks.h"

namespace torch_overlap::ops {
namespace {

bool uses_gemm_layer(const GemmArgs& args) {
  return args.rhs.scaling != ScalingMode::NO_SCALING ||
         args.out.scalar_type() != args.rhs.data.scalar_type() ||
         (args.out.is_cuda() && at::isFloatingType(args.out.scalar_type()));
}

at::Tensor matrix_of(const GemmOperand& operand) {
  return operand.transposed ? operand.data.t() : operand.data;
}

}  // namespace

ProfilerRange::ProfilerRange(std::string_view name, size_t index)
    : record_(at::RecordScope::USER_SCOPE) {
  if (record_.isActive()) record_.before(concat("torch_overlap::", name, "[", index, "]"));
}

at::Tensor as_rows(const at::Tensor& x) { return x.dim() == 2 ? x : x.flatten(0, -2); }

at::Tensor to_rows(const at::Tensor& x, int64_t dim) { return as_rows(dim_first(x, dim)); }

at::Tensor writable_rows(const at::Tensor& out, int64_t dim) {
  const auto rows = as_rows(out);
  return is_outermost(out, dim) ? rows : at::empty(rows.sizes(), rows.options());
}

void copy_rows_back(const at::Tensor& rows, const at::Tensor& out, int64_t dim) {
  if (is_outermost(out, dim)) return;
  const auto target = out.movedim(dim, 0);
  target.copy_(rows.view(target.sizes()));
}

at::Tensor contiguous_or_undefined(const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? bias->contiguous() : at::Tensor();
}

GemmOperand operand(const at::Tensor& x) {
  if (has_contiguous_rows(x)) return {.data = x};
  if (has_contiguous_rows(x.t())) return {.data = x.t(), .transposed = true};
  return {.data = x.contiguous()};
}

GemmOperand transposed_operand(const at::Tensor& x) {
  GemmOperand transposed = operand(x);
  transposed.transposed = !transposed.transposed;
  return transposed;
}

GemmArgs product_of_rows(const GemmArgs& whole, int64_t begin, int64_t length,
                         const at::Tensor& out) {
  GemmArgs part = whole;
  part.lhs.data = whole.lhs.transposed ? whole.lhs.data.narrow(1, begin, length)
                                       : row_view(whole.lhs.data, begin, length);
  if (whole.lhs.scale_inv.defined() && !is_tensor_scaling(whole.lhs.scaling)) {
    part.lhs.scale_inv = row_view(whole.lhs.scale_inv, begin, length);
  }
  part.out = out;
  return part;
}

Product::Product(std::string_view op, GemmArgs args) {
  if (uses_gemm_layer(args)) {
    gemm_.emplace(op, std::move(args));
  } else {
    args_ = std::move(args);
  }
}

void Product::run() const {
  if (gemm_) return gemm_->run();
  at::Tensor out = args_.out;
  const auto lhs = matrix_of(args_.lhs);
  const auto rhs = matrix_of(args_.rhs);
  if (args_.accumulate) {
    out.addmm_(lhs, rhs);
  } else if (args_.epilogue.bias.defined()) {
    at::addmm_out(out, args_.epilogue.bias, lhs, rhs);
  } else {
    at::mm_out(out, lhs, rhs);
  }
}

}  // namespace torch_overlap::ops
