#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rms_norm.h>

#include <functional>

#include "torch_overlap/gemm/quantize.h"
#include "torch_overlap/ops/autograd.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/rows.h"
#include "torch_overlap/overlap/device.h"

namespace torch_overlap::ops {
namespace {

// The normalized rows, and the rows before normalization.
using NormResults = std::tuple<Tensor, Tensor>;

// Checks the residual and the norm's weight for rows of `shape`, with the dtype and device of
// `like`.
void check_norm_operands(std::string_view op, c10::SymIntArrayRef shape, const Tensor& like,
                         const Tensor& residual, const Tensor& norm_weight, double eps) {
  TORCH_OVERLAP_CHECK(at::isFloatingType(like.scalar_type()) && like.element_size() >= 2, kType, op,
                      ": expected x of float16, bfloat16, float32 or float64, got ",
                      like.scalar_type(), ". Convert it.");
  check_dtype(op, "residual", like, residual);
  check_dtype(op, "the norm's weight", like, norm_weight);
  TORCH_OVERLAP_CHECK(residual.dim() == static_cast<int64_t>(shape.size()), kValue, op,
                      ": expected a residual of shape ", shape, ", that of the sum, got ",
                      residual.sym_sizes(), ". Reshape it.");
  for (int64_t i = 0; i < residual.dim(); ++i) {
    TORCH_OVERLAP_CHECK(shape[i].sym_eq(residual.sym_size(i)).expect_true(__FILE__, __LINE__),
                        kValue, op, ": expected a residual of shape ", shape,
                        ", that of the sum, got ", residual.sym_sizes(), ", which differs in ",
                        "dimension ", i, ". Pass this rank's residual.");
  }
  TORCH_OVERLAP_CHECK(norm_weight.dim() == 1, kValue, op,
                      ": expected the norm's weight with one dimension, got shape ",
                      norm_weight.sym_sizes(), ". Flatten it.");
  check_size(op, "the norm's weight", shape.back(), norm_weight.sym_size(0));
  TORCH_OVERLAP_CHECK(eps >= 0, kValue, op, ": expected eps >= 0, got ", eps,
                      ". It keeps the root from 0.");
}

NormResults results_like(c10::SymIntArrayRef shape, const Tensor& like) {
  return {at::empty_symint(shape, like.options()), at::empty_symint(shape, like.options())};
}

// Applies the residual and the norm to a complete sum, and multiplies. Used if gradients are
// needed.
NormResults add_and_norm(const Tensor& sum, const Tensor& residual, const Tensor& norm_weight,
                         double eps, const std::optional<Tensor>& next_weight) {
  auto hidden = at::add(residual, sum);
  auto out = at::rms_norm_symint(hidden, {norm_weight.sym_size(0)}, norm_weight, eps);
  if (next_weight) {
    const c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    out = at::linear(out, *next_weight);
  }
  return {std::move(out), std::move(hidden)};
}

template <typename Call>
void check_next_weight(const Call& call, c10::SymIntArrayRef shape) {
  if (!call.next_weight) return;
  const Tensor& weight = *call.next_weight;
  check_dtype(Call::kName, "next_weight", call.x, weight);
  TORCH_OVERLAP_CHECK(
      weight.dim() == 2 && shape.back().sym_eq(weight.sym_size(1)).expect_true(__FILE__, __LINE__),
      kValue, Call::kName, ": expected next_weight [out_features, ", shape.back(),
      "] for rows of shape ", shape, ", got shape ", weight.sym_sizes(),
      ". Pass weight.t() if it is [in_features, out_features].");
}

// The product of the normalized rows with the next weight, if the call has one.
class NextProduct {
 public:
  NextProduct() = default;  // the call has none
  template <typename Call>
  NextProduct(const Call& call, const Tensor& rows) : op_(Call::kName), rows_(rows) {
    if (!call.next_weight) return;
    weight_ = *call.next_weight;
    c10::SymDimVector shape(rows.sym_sizes());
    shape.back() = weight_.sym_size(0);
    out_ = at::empty_symint(shape, rows.options());
  }

  // Checks the product, before anything is sent. `is_early`: all_reduce_rms_norm is one kernel,
  // which waits for all that was enqueued before this call.
  void check(bool is_early) {
    if (!weight_.defined()) return;
    const auto matrix = [](const Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : as_rows(t); };
    GemmArgs args;
    args.lhs = {.data = matrix(rows_)};
    args.rhs = transposed_operand(weight_);
    args.out = matrix(out_);
    args.early_start = is_early ? EarlyStart::loads_rhs : EarlyStart::none;
    product_.emplace(op_, std::move(args));
  }
  // Returns a lock to hold until run(), if the product's kernel holds nearly all SMs while the norm
  // waits for other ranks; null if it does not. Requires check().
  std::shared_ptr<void> lock(const TorchComm& comm) const {
    if (!starts_early()) return nullptr;
    return overlap_device(op_, comm.device().type()).acquire_resident_kernel_lock(comm.device());
  }
  bool starts_early() const { return product_ && product_->starts_early(); }
  void run() const {
    if (product_) product_->run();
  }
  // Returns the product, or the rows if there is no next weight.
  Tensor result() const { return out_.defined() ? out_ : rows_; }

 private:
  std::string_view op_;
  Tensor rows_;
  Tensor weight_;
  Tensor out_;
  std::optional<Product> product_;
};

RmsNorm norm_of(const Tensor& residual, const Tensor& residual_out, const Tensor& norm_weight,
                const std::optional<Tensor>& bias, double eps) {
  return {.residual = residual.contiguous(),
          .residual_out = residual_out,
          .weight = norm_weight.contiguous(),
          .bias = bias ? bias->contiguous() : Tensor(),
          .eps = eps};
}

// --- all_reduce_rms_norm -------------------------------------------------------------------------

template <typename Call>
void check_all_reduce(const Call& call) {
  constexpr std::string_view kOp = Call::kName;
  const Tensor& x = call.x;
  check_group_size(kOp, call.group_size);
  TORCH_OVERLAP_CHECK(x.dim() >= 1, kValue, kOp,
                      ": expected x of one or more dimensions, got a scalar. Use x.reshape(1).");
  check_norm_operands(kOp, x.sym_sizes(), x, call.residual, call.weight, call.eps);
  if (call.bias) {
    check_dtype(kOp, "bias", x, *call.bias);
    TORCH_OVERLAP_CHECK(call.bias->dim() == 1, kValue, kOp,
                        ": expected a bias with one dimension, got shape ", call.bias->sym_sizes(),
                        ". Flatten it.");
    check_size(kOp, "bias", x.sym_size(-1), call.bias->sym_size(0));
  }
  if constexpr (requires { call.next_weight; }) check_next_weight(call, x.sym_sizes());
}

// Returns the quantization that the backend of the communicator does. None for the plain operators.
using QuantizationOf = std::function<RmsNorm::Quantization(const TorchComm&)>;
RmsNorm::Quantization no_quantization(const TorchComm&) { return {}; }

// This and run_matmul() return false if the call only explains its choice (ExplainScope).
template <typename Call>
bool run_all_reduce(const Call& call, const Tensor& out, const Tensor& hidden,
                    const QuantizationOf& quantization_of, NextProduct& next) {
  const auto comm = find_comm(Call::kName, call.comm, call.group_size);
  RmsNorm norm = norm_of(call.residual, hidden, call.weight, call.bias, call.eps);
  norm.terms = call.x.contiguous();
  norm.quantization = quantization_of(*comm);
  next.check(comm->rms_norm_kernel(out, norm) == NormKernel::ready);
  const auto lock = next.lock(*comm);
  comm->all_reduce_rms_norm(out, norm);
  next.run();
  return true;
}

NormResults all_reduce_rms_norm_kernel(const AllReduceRmsNorm& call) {
  check_all_reduce(call);
  auto [out, hidden] = results_like(call.x.sym_sizes(), call.x);
  NextProduct next(call, out);
  if (!is_shape_only(call.x)) run_all_reduce(call, out, hidden, no_quantization, next);
  return {next.result(), std::move(hidden)};
}

NormResults all_reduce_rms_norm_autograd(const AllReduceRmsNorm& call) {
  if (!needs_autograd(call)) {
    const BelowAutograd guard;
    return ops::all_reduce_rms_norm(call);
  }
  check_all_reduce(call);
  auto sum = ops::all_reduce(call.x, "sum", call.comm, call.group_size);
  if (call.bias) sum = at::add(sum, *call.bias);
  return add_and_norm(sum, call.residual, call.weight, call.eps, call.next_weight);
}

// --- matmul_all_reduce_rms_norm ------------------------------------------------------------------

// Returns the shape of both results.
template <typename Call>
c10::SymDimVector check_matmul(const Call& call) {
  constexpr std::string_view kOp = Call::kName;
  check_group_size(kOp, call.group_size);
  check_algorithm(kOp, call.algorithm);
  check_row_dim(kOp, call.x, 0, "rows");
  check_weight(kOp, call.x, call.weight);
  if (call.bias) check_bias(kOp, call.x, *call.bias, call.weight);
  c10::SymDimVector shape(call.x.sym_sizes());
  shape.back() = call.weight.sym_size(0);
  check_norm_operands(kOp, shape, call.x, call.residual, call.norm_weight, call.eps);
  if constexpr (requires { call.next_weight; }) check_next_weight(call, shape);
  return shape;
}

template <typename Call>
MatmulAllReduce without_norm(const Call& call) {
  return {.x = call.x,
          .weight = call.weight,
          .bias = call.bias,
          .comm = call.comm,
          .group_size = call.group_size,
          .algorithm = call.algorithm};
}

// Returns the algorithm of the product and its sum. The measurement is of a sum without a norm.
// With a norm after it, one kernel that sums and normalizes (`has_kernel`) is faster than a sum
// that saves a copy of its operand or, of few bytes, is part of the product's kernel.
std::optional<Algorithm> choose_with_norm(const AllReduceProduct& product,
                                          std::string_view algorithm, bool has_kernel) {
  constexpr size_t kMaxBytes = size_t{512} << 10;
  const auto is_replaced = [&](Algorithm chosen) {
    return algorithm == "auto" &&
           (chosen == Algorithm::low_latency ||
            (chosen == Algorithm::fused && has_kernel && product.out.nbytes() <= kMaxBytes));
  };
  auto chosen = choose_forward(problem_of(product), algorithm, product.comm);
  if (chosen && is_replaced(*chosen)) chosen = Algorithm::sequential;
  ExplainScope* const scope = ExplainScope::current();
  if (scope != nullptr && is_replaced(scope->choice->algorithm)) {
    scope->choice = {Algorithm::sequential,
                     "the quickest of the sum without the norm would leave the norm to another "
                     "kernel",
                     "rule"};
  }
  return chosen;
}

template <typename Call>
bool run_matmul(const Call& call, const Tensor& out, const Tensor& hidden,
                const QuantizationOf& quantization_of, NextProduct& next) {
  const auto comm = find_comm(Call::kName, call.comm, call.group_size);
  AllReduceProduct product = product_of(without_norm(call), comm, out);
  RmsNorm norm = norm_of(call.residual, hidden, call.norm_weight, call.bias, call.eps);
  norm.quantization = quantization_of(*comm);
  const NormKernel kernel = comm->rms_norm_kernel(out, norm);
  const auto algorithm = choose_with_norm(product, call.algorithm, kernel != NormKernel::none);
  if (!algorithm) return false;
  const bool is_sequential = algorithm == Algorithm::sequential;
  next.check(is_sequential && kernel == NormKernel::ready);
  std::shared_ptr<void> lock;
  if (is_sequential) {
    product.gemm.out = product.out;
    product.gemm.early_start = next.starts_early() ? EarlyStart::waits : EarlyStart::none;
    const Product first(Call::kName, std::move(product.gemm));
    lock = next.lock(*comm);
    first.run();
    comm->all_reduce_rms_norm(out, norm);
  } else {
    run_all_reduce(product, *algorithm);  // with the bias
    norm.bias = Tensor();
    comm->add_rms_norm(out, norm);
  }
  next.run();
  return true;
}

NormResults matmul_all_reduce_rms_norm_kernel(const MatmulAllReduceRmsNorm& call) {
  auto [out, hidden] = results_like(check_matmul(call), call.x);
  NextProduct next(call, out);
  if (!is_shape_only(call.x)) run_matmul(call, out, hidden, no_quantization, next);
  return {next.result(), std::move(hidden)};
}

NormResults matmul_all_reduce_rms_norm_autograd(const MatmulAllReduceRmsNorm& call) {
  if (!needs_autograd(call)) {
    const BelowAutograd guard;
    return ops::matmul_all_reduce_rms_norm(call);
  }
  check_matmul(call);
  return add_and_norm(ops::matmul_all_reduce(without_norm(call)), call.residual, call.norm_weight,
                      call.eps, call.next_weight);
}

// --- Quantized rows ------------------------------------------------------------------------------

NormScaling norm_scaling(ScalingMode mode) {
  switch (mode) {
    case ScalingMode::DELAYED_TENSOR_SCALING:
      return NormScaling::tensor;
    case ScalingMode::ROW_SCALING:
      return NormScaling::row;
    case ScalingMode::BLOCK_1D_SCALING:
      return NormScaling::block;
    default:
      return NormScaling::none;
  }
}

template <typename Call>
void check_scale_of(const Call& call, ScalingMode mode) {
  const bool takes_scale = mode == ScalingMode::DELAYED_TENSOR_SCALING;
  TORCH_OVERLAP_CHECK(call.scale.has_value() == takes_scale, kValue, Call::kName, ": expected ",
                      takes_scale ? "a scale" : "no scale", " for ", to_string(mode), ", got ",
                      takes_scale ? "none" : "one",
                      takes_scale ? ". Pass the factor of the values."
                                  : ", which computes its own. Use DELAYED_TENSOR_SCALING.");
  if (takes_scale) check_scale(Call::kName, call.x, *call.scale);
}

// `run` is run_all_reduce() or run_matmul(). Where the backend has no kernel for the quantization,
// it follows as an operation of its own, with the same values.
template <typename Call, typename Run>
typename Call::Result quantize_rows(const Call& call, c10::SymIntArrayRef shape, const Run& run) {
  const QuantizeOptions options{.scaling = scaling_mode(Call::kName, call.scaling_mode)};
  check_scale_of(call, options.scaling);
  auto [out, hidden] = results_like(shape, call.x);
  auto quantized = empty_quantized(Call::kName, out, options);
  const auto results = [&] {
    auto norm = call.return_norm ? out : at::empty({0}, out.options());
    return typename Call::Result{quantized.data, quantized.scale_inv, hidden, std::move(norm)};
  };
  if (is_shape_only(call.x)) return results();
  bool is_quantized = false;
  const auto quantization_of = [&](const TorchComm& comm) -> RmsNorm::Quantization {
    const NormScaling scaling = norm_scaling(options.scaling);
    is_quantized = scaling != NormScaling::none && out.numel() > 0 && comm.quantizes_rms_norm(out);
    if (!is_quantized) return {};
    return {.scaling = scaling,
            .scale = call.scale.value_or(Tensor()),
            .data = quantized.data,
            .scale_inv = quantized.scale_inv,
            .keeps_rows = call.return_norm};
  };
  NextProduct none;
  if (run(call, out, hidden, quantization_of, none) && !is_quantized) {
    quantized = call.scale ? quantize_delayed(Call::kName, out, *call.scale, options).first
                           : quantize(Call::kName, out, options);
  }
  return results();
}

AllReduceRmsNormQuantize::Result all_reduce_rms_norm_quantize_kernel(
    const AllReduceRmsNormQuantize& call) {
  check_all_reduce(call);
  return quantize_rows(call, call.x.sym_sizes(), run_all_reduce<AllReduceRmsNormQuantize>);
}

MatmulAllReduceRmsNormQuantize::Result matmul_all_reduce_rms_norm_quantize_kernel(
    const MatmulAllReduceRmsNormQuantize& call) {
  return quantize_rows(call, check_matmul(call), run_matmul<MatmulAllReduceRmsNormQuantize>);
}

}  // namespace

NormResults all_reduce_rms_norm(const AllReduceRmsNorm& call) {
  return Operator<AllReduceRmsNorm>::dispatch(call);
}

NormResults matmul_all_reduce_rms_norm(const MatmulAllReduceRmsNorm& call) {
  return Operator<MatmulAllReduceRmsNorm>::dispatch(call);
}

TORCH_OVERLAP_OPERATOR(AllReduceRmsNorm, all_reduce_rms_norm_kernel)
TORCH_OVERLAP_AUTOGRAD(AllReduceRmsNorm, all_reduce_rms_norm_autograd)
TORCH_OVERLAP_OPERATOR(MatmulAllReduceRmsNorm, matmul_all_reduce_rms_norm_kernel)
TORCH_OVERLAP_AUTOGRAD(MatmulAllReduceRmsNorm, matmul_all_reduce_rms_norm_autograd)
TORCH_OVERLAP_AUTOCAST(MatmulAllReduceRmsNorm)
TORCH_OVERLAP_OPERATOR(AllReduceRmsNormQuantize, all_reduce_rms_norm_quantize_kernel)
TORCH_OVERLAP_NO_GRADIENT(AllReduceRmsNormQuantize::kName)
TORCH_OVERLAP_OPERATOR(MatmulAllReduceRmsNormQuantize, matmul_all_reduce_rms_norm_quantize_kernel)
TORCH_OVERLAP_NO_GRADIENT(MatmulAllReduceRmsNormQuantize::kName)

}  // namespace torch_overlap::ops
