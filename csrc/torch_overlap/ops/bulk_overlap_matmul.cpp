#include <ATen/ops/empty.h>

#include <numeric>

#include "torch_overlap/comm/validate.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"
#include "torch_overlap/overlap/op_channels.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kBulkOverlapMatmul = "bulk_overlap_matmul";

bool gathers(std::string_view collective) { return collective == "all_gather"; }

// Allocates the result of `collective` on x.
Tensor collective_out(const Tensor& x, std::string_view collective, int64_t group_size,
                      int64_t dim) {
  auto sizes = x.sym_sizes().vec();
  if (gathers(collective)) {
    sizes[dim] *= group_size;
  } else {
    check_divisible(kBulkOverlapMatmul, x, dim, group_size, "other");
    sizes[dim] = sizes[dim] / group_size;
  }
  return at::empty_symint(sizes, x.options());
}

// Allocates linear(x, weight, bias) and the result of the collective on `other`.
std::tuple<Tensor, Tensor> bulk_overlap_matmul_out(const Tensor& x, const Tensor& weight,
                                                   const std::optional<Tensor>& bias,
                                                   const Tensor& other, std::string_view collective,
                                                   int64_t group_size, int64_t dim,
                                                   std::string_view algorithm) {
  check_group_size(kBulkOverlapMatmul, group_size);
  check_choice(kBulkOverlapMatmul, "algorithm", "auto sequential pipelined bulk", algorithm);
  check_choice(kBulkOverlapMatmul, "collective", "all_gather reduce_scatter", collective);
  TORCH_OVERLAP_CHECK(x.dim() >= 2, kValue, kBulkOverlapMatmul,
                      ": expected x of two or more dimensions, got shape ", x.sym_sizes(),
                      "; use x.unsqueeze(0)");
  check_weight(kBulkOverlapMatmul, x, weight);
  if (bias) check_bias(kBulkOverlapMatmul, x, *bias, weight);
  TORCH_OVERLAP_CHECK(other.device() == x.device(), kType, kBulkOverlapMatmul,
                      ": expected other on device ", x.device(), " as x, got ", other.device(),
                      "; move one of them");
  if (!gathers(collective)) {
    check_reduction(kBulkOverlapMatmul, other.scalar_type(), RedOpType::SUM);
  }
  const int64_t wrapped = wrap_dim(kBulkOverlapMatmul, other, dim, "dim");
  auto sizes = x.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return {at::empty_symint(sizes, x.options()),
          collective_out(other, collective, group_size, wrapped)};
}

//  out = lhs * rhs + bias, all of two dimensions.
struct GemmOperands {
  Tensor out;
  Tensor lhs;
  Tensor rhs;
  std::optional<Tensor> bias;
};

void multiply(const std::vector<GemmOperands>& products, bool overlaps_communication) {
  for (size_t i = 0; i < products.size(); ++i) {
    const ProfilerRange span("chunk_gemm", i);
    linear_out(kBulkOverlapMatmul, products[i].out, products[i].lhs, products[i].rhs.t(),
               products[i].bias, overlaps_communication);
  }
}

// Maximum length of the rows into which a sum is reshaped. A rank's part is contiguous if `dim` is
// first, so it can be split into rows of any length: long ones, but short enough that many blocks
// share them.
constexpr int64_t kMaxColumns = 4096;

// Gathers all ranks' `own`, dim first, on the gather channel while the products run.
void gather_over_channel(const std::shared_ptr<TorchComm>& comm, const Tensor& own,
                         const std::vector<GemmArgs>& products, const Tensor& out) {
  ChannelGather gather(kBulkOverlapMatmul, comm, own.view({1, own.numel()}));
  for (const auto& args : products) gemm(kBulkOverlapMatmul, args);
  gather.finish();
  out.copy_(gather.rows().view(out.sizes()));
}

// Computes this rank's part of the sum of `parts`, dim first, on the scatter channel while the
// products run.
void scatter_over_channel(const std::shared_ptr<TorchComm>& comm, const Tensor& parts,
                          const std::vector<GemmArgs>& products, const Tensor& out) {
  const int64_t columns = std::gcd(parts.numel() / comm->size(), kMaxColumns);
  const int64_t rows = parts.numel() / columns;
  const auto channel = operator_channel(kBulkOverlapMatmul, comm, OperatorChannel::scatter,
                                        static_cast<int64_t>(parts.nbytes()));
  const OverlapChannel::Use use(*channel);
  channel->data(0, parts.sizes(), parts.scalar_type()).copy_(parts);
  run_bulk_gemm(kBulkOverlapMatmul, *channel,
                {.gemms = products,
                 .rows = {rows, comm->size()},
                 .columns = columns,
                 .dtype = parts.scalar_type(),
                 .gathers = false,
                 .out = out.view({rows / comm->size(), columns}),
                 .scale_inv = {},
                 .blocks = kBulkBlocks});
}

// Returns the checked GEMM arguments: no error is possible once a transfer has started.
std::vector<GemmArgs> gemms_of(const std::vector<GemmOperands>& products) {
  std::vector<GemmArgs> gemms;
  for (const auto& product : products) {
    GemmArgs args;
    args.lhs = operand(product.lhs);
    args.rhs = operand(product.rhs);
    args.out = product.out;
    args.epilogue.bias = product.bias.value_or(Tensor());
    args.overlaps_communication = true;
    check_gemm(kBulkOverlapMatmul, args);
    gemms.push_back(std::move(args));
  }
  return gemms;
}

// Runs the products concurrently with `result` = the collective of `other`.
void run_concurrently(const std::shared_ptr<TorchComm>& comm, std::string_view algorithm,
                      const std::vector<GemmOperands>& products, const Tensor& other,
                      std::string_view collective, int64_t dim, const Tensor& result) {
  const auto own = dim_first(other, dim);
  const bool in_place = dim == 0;
  const auto out = in_place ? result : at::empty(result.movedim(dim, 0).sizes(), result.options());
  const bool gather = gathers(collective);
  const Tensor& product = products.at(0).out;
  if (!gather && !is_channel_dtype(other.scalar_type())) {
    TORCH_OVERLAP_CHECK(algorithm != "bulk", kUnsupported, kBulkOverlapMatmul,
                        ": expected other of dtype float64, float32, float16 or bfloat16 for "
                        "algorithm 'bulk', got ",
                        other.scalar_type(), "; use 'pipelined'");
    if (algorithm == "auto")
      algorithm = is_worth_chunks(product.size(0)) ? "pipelined" : "sequential";
  }
  if (other.numel() == 0) algorithm = "sequential";
  const auto chosen =
      choose_algorithm({.op = kBulkOverlapMatmul,
                        .dtype = product.scalar_type(),
                        .chunk_rows = product.size(0),
                        .gather_bytes = gather ? gather_bytes(*comm, own) : 0,
                        .scatter_bytes = gather ? 0 : static_cast<int64_t>(own.nbytes())},
                       algorithm, comm);
  if (chosen == Algorithm::p2p || chosen == Algorithm::bulk) {
    if (gather) {
      gather_over_channel(comm, own, gemms_of(products), out);
    } else {
      scatter_over_channel(comm, own, gemms_of(products), out);
    }
  } else {
    const bool async = chosen == Algorithm::pipelined;
    WorkPtr work;
    {
      const ProfilerRange span("chunk_comm", 0);
      work = gather ? comm->all_gather_single(out, own, async)
                    : comm->reduce_scatter_single(out, own, RedOpType::SUM, async);
    }
    multiply(products, async);
    if (work) {
      const ProfilerRange span("chunk_wait", 0);
      work->wait();
    }
  }
  if (!in_place) result.copy_(out.movedim(0, dim));
}

std::tuple<Tensor, Tensor> bulk_overlap_matmul_kernel(const Tensor& x, const Tensor& weight,
                                                      const std::optional<Tensor>& bias,
                                                      const Tensor& other,
                                                      std::string_view collective,
                                                      std::string_view comm, int64_t group_size,
                                                      int64_t dim, std::string_view algorithm) {
  auto out =
      bulk_overlap_matmul_out(x, weight, bias, other, collective, group_size, dim, algorithm);
  auto& [product, result] = out;
  const auto communicator = find_comm(kBulkOverlapMatmul, comm, group_size);
  run_concurrently(communicator, algorithm,
                   {{product.flatten(0, -2), to_rows(x, 0), weight.t(), bias}}, other, collective,
                   wrap_dim(kBulkOverlapMatmul, other, dim, "dim"), result);
  return out;
}

std::tuple<Tensor, Tensor> bulk_overlap_matmul_meta(const Tensor& x, const Tensor& weight,
                                                    const std::optional<Tensor>& bias,
                                                    const Tensor& other,
                                                    std::string_view collective, std::string_view,
                                                    int64_t group_size, int64_t dim,
                                                    std::string_view algorithm) {
  return bulk_overlap_matmul_out(x, weight, bias, other, collective, group_size, dim, algorithm);
}

// The gradient of `other` is the dual collective, which overlaps the layer's two gradient products.

std::string_view dual_collective(std::string_view collective) {
  return gathers(collective) ? "reduce_scatter" : "all_gather";
}

using BulkGradients = std::tuple<Tensor, Tensor, Tensor>;

BulkGradients bulk_gradients_out(const Tensor& x, const Tensor& weight, const Tensor& other_grad,
                                 bool x_wanted, bool weight_wanted, std::string_view collective,
                                 int64_t group_size, int64_t dim) {
  const auto like = [](const Tensor& tensor, bool wanted) {
    return wanted ? at::empty_symint(tensor.sym_sizes(), tensor.options())
                  : at::empty({0}, tensor.options());
  };
  return {like(x, x_wanted), like(weight, weight_wanted),
          collective_out(other_grad, dual_collective(collective), group_size, dim)};
}

BulkGradients bulk_gradients_kernel(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                    const Tensor& other_grad, bool x_wanted, bool weight_wanted,
                                    std::string_view collective, std::string_view comm,
                                    int64_t group_size, int64_t dim, std::string_view algorithm) {
  auto out = bulk_gradients_out(x, weight, other_grad, x_wanted, weight_wanted, collective,
                                group_size, dim);
  auto& [x_grad, weight_grad, other] = out;
  const auto communicator = find_comm(kBulkOverlapMatmul, comm, group_size);
  const auto grad_rows = to_rows(grad, 0);
  std::vector<GemmOperands> products;
  if (x_wanted) products.push_back({x_grad.flatten(0, -2), grad_rows, weight, std::nullopt});
  if (weight_wanted) {
    products.push_back({weight_grad, grad_rows.t(), to_rows(x, 0), std::nullopt});
  }
  run_concurrently(communicator, algorithm, products, other_grad, dual_collective(collective), dim,
                   other);
  return out;
}

BulkGradients bulk_gradients_meta(const Tensor&, const Tensor& x, const Tensor& weight,
                                  const Tensor& other_grad, bool x_wanted, bool weight_wanted,
                                  std::string_view collective, std::string_view, int64_t group_size,
                                  int64_t dim, std::string_view) {
  return bulk_gradients_out(x, weight, other_grad, x_wanted, weight_wanted, collective, group_size,
                            dim);
}

class BulkOverlapMatmul : public Function<BulkOverlapMatmul> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                               const Tensor& other, const std::optional<Tensor>& bias,
                               std::string_view collective, std::string_view comm,
                               int64_t group_size, int64_t dim, std::string_view algorithm) {
    const BelowAutograd guard;
    auto [product, result] = ops::bulk_overlap_matmul(x, weight, bias, other, collective, comm,
                                                      group_size, dim, algorithm);
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["collective"] = std::string(collective);
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["dim"] = wrap_dim(kBulkOverlapMatmul, other, dim, "dim");
    ctx->saved_data["algorithm"] = std::string(algorithm);
    ctx->set_materialize_grads(false);
    if (!result.is_floating_point() && !result.is_complex()) ctx->mark_non_differentiable({result});
    return {std::move(product), std::move(result)};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto& [x, weight] = std::tie(saved[0], saved[1]);
    const auto& [grad, other_grad] = std::tie(grads[0], grads[1]);
    const auto& collective = ctx->saved_data["collective"].toStringRef();
    const auto& comm = ctx->saved_data["comm"].toStringRef();
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    const int64_t dim = ctx->saved_data["dim"].toInt();
    variable_list result(9);
    if (grad.defined() && ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(3)) {
      result[3] = grad.flatten(0, -2).sum(0);
    }
    const bool x_wanted = grad.defined() && ctx->needs_input_grad(0);
    const bool weight_wanted = grad.defined() && ctx->needs_input_grad(1);
    const bool other_wanted = other_grad.defined() && ctx->needs_input_grad(2);
    if (other_wanted && (x_wanted || weight_wanted) && !at::GradMode::is_enabled()) {
      static const auto gradients =
          find_op<decltype(bulk_gradients_kernel)>("_bulk_overlap_matmul_backward");
      auto [x_grad, weight_grad, own_grad] =
          gradients.call(grad, x, weight, other_grad, x_wanted, weight_wanted, collective, comm,
                         group_size, dim, ctx->saved_data["algorithm"].toStringRef());
      if (x_wanted) result[0] = std::move(x_grad);
      if (weight_wanted) result[1] = std::move(weight_grad);
      result[2] = std::move(own_grad);
      return result;
    }
    if (other_wanted) {
      result[2] = gathers(collective)
                      ? ops::reduce_scatter(other_grad, dim, "sum", comm, group_size)
                      : ops::all_gather(other_grad, dim, comm, group_size);
    }
    if (x_wanted) result[0] = grad.matmul(weight);
    if (weight_wanted) result[1] = grad.flatten(0, -2).t().mm(x.flatten(0, -2));
    return result;
  }
};

std::tuple<Tensor, Tensor> bulk_overlap_matmul_autograd(const Tensor& x, const Tensor& weight,
                                                        const std::optional<Tensor>& bias,
                                                        const Tensor& other,
                                                        std::string_view collective,
                                                        std::string_view comm, int64_t group_size,
                                                        int64_t dim, std::string_view algorithm) {
  const auto present = bias && bias->defined() ? bias : std::nullopt;
  if (needs_autograd(x) || needs_autograd(weight) || (present && needs_autograd(*present)) ||
      needs_autograd(other)) {
    auto out = BulkOverlapMatmul::apply(x, weight, other, present, collective, comm, group_size,
                                        dim, algorithm);
    return {std::move(out[0]), std::move(out[1])};
  }
  const BelowAutograd guard;
  return ops::bulk_overlap_matmul(x, weight, present, other, collective, comm, group_size, dim,
                                  algorithm);
}

}  // namespace

std::tuple<Tensor, Tensor> bulk_overlap_matmul(const Tensor& x, const Tensor& weight,
                                               const std::optional<Tensor>& bias,
                                               const Tensor& other, std::string_view collective,
                                               std::string_view comm, int64_t group_size,
                                               int64_t dim, std::string_view algorithm) {
  static const auto handle = find_op<decltype(bulk_overlap_matmul_kernel)>("bulk_overlap_matmul");
  return handle.call(x, weight, bias, other, collective, comm, group_size, dim, algorithm);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "bulk_overlap_matmul(Tensor x, Tensor weight, Tensor? bias, Tensor other, str collective,"
      " str comm, int group_size, int dim=0, str algorithm=\"auto\") -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_bulk_overlap_matmul_backward(Tensor grad, Tensor x, Tensor weight, Tensor other_grad,"
      " bool x_wanted, bool weight_wanted, str collective, str comm, int group_size, int dim,"
      " str algorithm) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("bulk_overlap_matmul", torch_overlap::ops::bulk_overlap_matmul_kernel);
  m.impl("_bulk_overlap_matmul_backward", torch_overlap::ops::bulk_gradients_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("bulk_overlap_matmul", torch_overlap::ops::bulk_overlap_matmul_meta);
  m.impl("_bulk_overlap_matmul_backward", torch_overlap::ops::bulk_gradients_meta);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("bulk_overlap_matmul", torch_overlap::ops::bulk_overlap_matmul_autograd);
}
