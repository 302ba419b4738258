#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rms_norm.h>

#include "torch_overlap/gemm/quantize.h"
#include "torch_overlap/ops/autograd.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/rows.h"
#include "torch_overlap/ops/scaled.h"
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
constexpr bool kQuantizes = requires(const Call& call) { call.scaling_mode; };

// Modes of the quantized rows and of the weight that they are multiplied by.
template <typename Call>
ScaledModes modes_of(const Call& call) {
  const ScalingMode mode = scaling_mode(Call::kName, call.scaling_mode);
  TORCH_OVERLAP_CHECK(mode != ScalingMode::NO_SCALING, kValue, Call::kName,
                      ": expected a scaling_mode of 8-bit values, got NO_SCALING. Use another "
                      "ScalingMode.");
  return call.next_weight ? modes_of_product(mode) : ScaledModes{.x = mode, .weight = mode};
}

template <typename Call>
void check_next_weight(const Call& call, c10::SymIntArrayRef shape) {
  constexpr std::string_view kOp = Call::kName;
  if constexpr (kQuantizes<Call>) {
    TORCH_OVERLAP_CHECK(call.next_weight.has_value() == call.next_weight_scale_inv.has_value(),
                        kValue, kOp, ": expected next_weight and next_weight_scale_inv, got only ",
                        call.next_weight ? "the weight" : "the scales",
                        ". Pass both results of quantize.");
  }
  if (!call.next_weight) return;
  const Tensor& weight = *call.next_weight;
  TORCH_OVERLAP_CHECK(
      weight.dim() == 2 && shape.back().sym_eq(weight.sym_size(1)).expect_true(__FILE__, __LINE__),
      kValue, kOp, ": expected next_weight [out_features, ", shape.back(), "] for rows of shape ",
      shape, ", got shape ", weight.sym_sizes(),
      ". Pass weight.t() if it is [in_features, out_features].");
  if constexpr (!kQuantizes<Call>) {
    check_dtype(kOp, "next_weight", call.x, weight);
  } else {
    const ScalingMode mode = modes_of(call).weight;
    TORCH_OVERLAP_CHECK(call.x.scalar_type() != at::kDouble, kType, kOp,
                        ": expected x of float16, bfloat16 or float32 with a next_weight, whose "
                        "product has its dtype, got float64. Convert it.");
    check_quantized(kOp, {.name = "next_weight"}, weight, *call.next_weight_scale_inv, mode);
    TORCH_OVERLAP_CHECK(weight.device() == call.x.device(), kType, kOp,
                        ": expected next_weight on device ", call.x.device(), " as x, got ",
                        weight.device(), ". Move one of them.");
  }
}

// The normalized rows of a call, and what it makes of them: their quantized values, then the
// product of these or of the rows with the next weight.
class NormOutput {
 public:
  template <typename Call>
  NormOutput(const Call& call, c10::SymIntArrayRef shape)
      : op_(Call::kName), rows_(at::empty_symint(shape, call.x.options())) {
    if constexpr (kQuantizes<Call>) {
      modes_ = modes_of(call);
      quantize_ = {{.scaling = modes_.x}};
      scale_ = call.scale;
      keeps_rows_ = call.return_norm;
      quantized_ = empty_quantized(op_, rows_, *quantize_);
      weight_scale_inv_ = call.next_weight_scale_inv.value_or(Tensor());
    }
    if (!call.next_weight) return;
    weight_ = *call.next_weight;
    c10::SymDimVector sizes(shape);
    sizes.back() = weight_.sym_size(0);
    product_ = at::empty_symint(sizes, rows_.options());
  }

  const Tensor& rows() const { return rows_; }
  // Returns the part of the quantization that is done by the norm's kernel.
  RmsNorm::Quantization quantization_of(const TorchComm& comm) {
    if (!quantize_) return {};
    const NormScaling scaling = norm_scaling(quantize_->scaling);
    is_quantized_ =
        scaling != NormScaling::none && rows_.numel() > 0 && comm.quantizes_rms_norm(rows_);
    if (!is_quantized_) return {};
    return {.scaling = scaling,
            .scale = scale_.value_or(Tensor()),
            .data = quantized_.data,
            .scale_inv = quantized_.scale_inv,
            .keeps_rows = keeps_rows_};
  }
  // Checks the product, before anything is sent. `is_early`: the norm is one kernel, which waits
  // for all that was enqueued before this call. Requires quantization_of().
  void check(bool is_early) {
    starts_early_ = is_early && (!quantize_ || is_quantized_);
    if (product_.defined()) prepare_product();
  }
  // Returns a lock to hold until run(), if the product's kernel holds nearly all SMs while the norm
  // waits for other ranks; null if it does not. Requires check().
  std::shared_ptr<void> lock(const TorchComm& comm) const {
    if (!starts_early()) return nullptr;
    return overlap_device(op_, comm.device().type()).acquire_resident_kernel_lock(comm.device());
  }
  bool starts_early() const { return prepared_ && prepared_->starts_early(); }
  // Enqueues what follows the norm. Requires check().
  void run() {
    if (quantize_ && !is_quantized_) {
      quantized_ = scale_ ? quantize_delayed(op_, rows_, *scale_, *quantize_).first
                          : quantize(op_, rows_, *quantize_);
      if (prepared_) prepare_product();
    }
    if (prepared_) prepared_->run();
  }

  // Returns the product; without one, the quantized values, or the rows.
  Tensor result() const {
    if (product_.defined()) return product_;
    return quantize_ ? quantized_.data : rows_;
  }
  const Tensor& scale_inv() const { return quantized_.scale_inv; }

 private:
  static Tensor matrix(const Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : as_rows(t); }
  static NormScaling norm_scaling(ScalingMode mode) {
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
  void prepare_product() {
    GemmArgs args;
    if (quantize_) {
      args = scaled_product(quantized_.scale_inv, weight_, weight_scale_inv_, modes_,
                            /*use_split_accumulator=*/false);
      weight_ = args.rhs.data;  // contiguous, also for a second time
      args.lhs.data = matrix(quantized_.data);
      args.lhs.scale_inv = quantized_.scale_inv;
    } else {
      args.lhs.data = matrix(rows_);
      args.rhs = transposed_operand(weight_);
    }
    args.out = matrix(product_);
    args.early_start = starts_early_ ? EarlyStart::loads_rhs : EarlyStart::none;
    prepared_.emplace(op_, std::move(args));
  }

  std::string_view op_;
  Tensor rows_;
  // Quantization.
  std::optional<QuantizeOptions> quantize_;
  std::optional<Tensor> scale_;
  bool keeps_rows_ = true;
  Quantized quantized_;
  bool is_quantized_ = false;  // by the norm's kernel
  // Product.
  ScaledModes modes_{};
  Tensor weight_;
  Tensor weight_scale_inv_;
  Tensor product_;
  bool starts_early_ = false;
  std::optional<Product> prepared_;
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
  check_next_weight(call, x.sym_sizes());
}

template <typename Call>
void run_all_reduce(const Call& call, NormOutput& out, const Tensor& hidden) {
  const auto comm = find_comm(Call::kName, call.comm, call.group_size);
  RmsNorm norm = norm_of(call.residual, hidden, call.weight, call.bias, call.eps);
  norm.terms = call.x.contiguous();
  norm.quantization = out.quantization_of(*comm);
  out.check(comm->rms_norm_kernel(out.rows(), norm) == NormKernel::ready);
  const auto lock = out.lock(*comm);
  comm->all_reduce_rms_norm(out.rows(), norm);
  out.run();
}

NormResults all_reduce_rms_norm_kernel(const AllReduceRmsNorm& call) {
  check_all_reduce(call);
  NormOutput out(call, call.x.sym_sizes());
  auto hidden = at::empty_like(out.rows());
  if (!is_shape_only(call.x)) run_all_reduce(call, out, hidden);
  return {out.result(), std::move(hidden)};
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
  check_next_weight(call, shape);
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

// Computes nothing if the call only explains its choice (ExplainScope).
template <typename Call>
void run_matmul(const Call& call, NormOutput& out, const Tensor& hidden) {
  const auto comm = find_comm(Call::kName, call.comm, call.group_size);
  AllReduceProduct product = product_of(without_norm(call), comm, out.rows());
  RmsNorm norm = norm_of(call.residual, hidden, call.norm_weight, call.bias, call.eps);
  norm.quantization = out.quantization_of(*comm);
  const NormKernel kernel = comm->rms_norm_kernel(out.rows(), norm);
  const auto algorithm = choose_with_norm(product, call.algorithm, kernel != NormKernel::none);
  if (!algorithm) return;
  const bool is_sequential = algorithm == Algorithm::sequential;
  out.check(is_sequential && kernel == NormKernel::ready);
  std::shared_ptr<void> lock;
  if (is_sequential) {
    product.gemm.out = product.out;
    product.gemm.early_start = out.starts_early() ? EarlyStart::waits : EarlyStart::none;
    const Product first(Call::kName, std::move(product.gemm));
    lock = out.lock(*comm);
    first.run();
    comm->all_reduce_rms_norm(out.rows(), norm);
  } else {
    run_all_reduce(product, *algorithm);  // with the bias
    norm.bias = Tensor();
    comm->add_rms_norm(out.rows(), norm);
  }
  out.run();
}

NormResults matmul_all_reduce_rms_norm_kernel(const MatmulAllReduceRmsNorm& call) {
  NormOutput out(call, check_matmul(call));
  auto hidden = at::empty_like(out.rows());
  if (!is_shape_only(call.x)) run_matmul(call, out, hidden);
  return {out.result(), std::move(hidden)};
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

template <typename Call>
void check_scale_of(const Call& call) {
  const ScalingMode mode = scaling_mode(Call::kName, call.scaling_mode);
  const bool takes_scale = mode == ScalingMode::DELAYED_TENSOR_SCALING;
  TORCH_OVERLAP_CHECK(call.scale.has_value() == takes_scale, kValue, Call::kName, ": expected ",
                      takes_scale ? "a scale" : "no scale", " for ", to_string(mode), ", got ",
                      takes_scale ? "none" : "one",
                      takes_scale ? ". Pass the factor of the values."
                                  : ", which computes its own. Use DELAYED_TENSOR_SCALING.");
  if (takes_scale) check_scale(Call::kName, call.x, *call.scale);
}

// `run` is run_all_reduce() or run_matmul().
template <typename Call, typename Run>
typename Call::Result quantize_rows(const Call& call, c10::SymIntArrayRef shape, const Run& run) {
  check_scale_of(call);
  NormOutput out(call, shape);
  auto hidden = at::empty_like(out.rows());
  if (!is_shape_only(call.x)) run(call, out, hidden);
  return {out.result(), out.scale_inv(), std::move(hidden),
          call.return_norm ? out.rows() : at::empty({0}, out.rows().options())};
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
