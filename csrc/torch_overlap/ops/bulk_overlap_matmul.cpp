#include <ATen/ops/empty.h>

#include <numeric>

#include "torch_overlap/comm/validate.h"
#include "torch_overlap/ops/autograd.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/rows.h"
#include "torch_overlap/overlap/op_channels.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kBulkOverlapMatmul = BulkOverlapMatmul::kName;

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
BulkOverlapMatmul::Result allocate(const BulkOverlapMatmul& call) {
  const auto& [x, weight, other] = std::tie(call.x, call.weight, call.other);
  check_group_size(kBulkOverlapMatmul, call.group_size);
  check_choice(kBulkOverlapMatmul, "algorithm", "auto sequential pipelined bulk", call.algorithm);
  check_choice(kBulkOverlapMatmul, "collective", "all_gather reduce_scatter", call.collective);
  check_row_dim(kBulkOverlapMatmul, x, 0, "rows");
  check_weight(kBulkOverlapMatmul, x, weight);
  if (call.bias) check_bias(kBulkOverlapMatmul, x, *call.bias, weight);
  TORCH_OVERLAP_CHECK(other.device() == x.device(), kType, kBulkOverlapMatmul,
                      ": expected other on device ", x.device(), " as x, got ", other.device(),
                      "; move one of them");
  if (!gathers(call.collective))
    check_reduction(kBulkOverlapMatmul, other.scalar_type(), RedOpType::SUM);
  const int64_t dim = wrap_dim(kBulkOverlapMatmul, other, call.dim, "dim");
  auto sizes = x.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return {at::empty_symint(sizes, x.options()),
          collective_out(other, call.collective, call.group_size, dim)};
}

// The products that run concurrently with the collective.
void multiply(const std::vector<GemmArgs>& gemms) {
  std::vector<Product> products;
  for (const GemmArgs& args : gemms) products.emplace_back(kBulkOverlapMatmul, args);
  for (size_t i = 0; i < products.size(); ++i) {
    const ProfilerRange span("chunk_gemm", i);
    products[i].run();
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

// Computes this rank's part of the sum of `parts`, dim first, on the reduce-scatter channel while
// the products run.
void scatter_over_channel(const std::shared_ptr<TorchComm>& comm, const Tensor& parts,
                          const std::vector<GemmArgs>& products, const Tensor& out) {
  const int64_t columns = std::gcd(parts.numel() / comm->size(), kMaxColumns);
  const int64_t rows = parts.numel() / columns;
  const auto channel = operator_channel(kBulkOverlapMatmul, comm, OperatorChannel::reduce_scatter,
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
                 .blocks = kBulkBlocks});
}

// The only algorithm of this operator that uses memory of other ranks is "bulk".
void explain_as_bulk() {
  ExplainScope* const scope = ExplainScope::current();  // null in a PrepareScope
  if (scope != nullptr && scope->choice->algorithm == Algorithm::p2p) {
    scope->choice->algorithm = Algorithm::bulk;
  }
}

// Runs the products concurrently with `result` = the collective of `other`.
void run_concurrently(const std::shared_ptr<TorchComm>& comm, std::string_view algorithm,
                      std::vector<GemmArgs> products, const Tensor& other,
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
  const auto chosen = choose_algorithm(
      {.op = kBulkOverlapMatmul,
       .dtype = product.scalar_type(),
       .chunk_rows = product.size(0),
       .gather_bytes = gather ? std::optional(gather_bytes(*comm, own)) : std::nullopt,
       .reduce_scatter_bytes = gather ? std::nullopt : std::optional<int64_t>(own.nbytes())},
      algorithm, comm);
  if (!chosen) return explain_as_bulk();
  for (GemmArgs& args : products) args.overlaps_communication = chosen != Algorithm::sequential;
  if (chosen == Algorithm::p2p || chosen == Algorithm::bulk) {
    for (const GemmArgs& args : products)
      check_gemm(kBulkOverlapMatmul, args);  // before anything is sent
    if (gather) {
      gather_over_channel(comm, own, products, out);
    } else {
      scatter_over_channel(comm, own, products, out);
    }
  } else {
    const bool async = chosen == Algorithm::pipelined;
    WorkPtr work;
    {
      const ProfilerRange span("chunk_comm", 0);
      work = gather ? comm->all_gather_single(out, own, async)
                    : comm->reduce_scatter_single(out, own, RedOpType::SUM, async);
    }
    multiply(products);
    if (work) {
      const ProfilerRange span("chunk_wait", 0);
      work->wait();
    }
  }
  if (!in_place) result.copy_(out.movedim(0, dim));
}

GemmArgs product(const GemmOperand& lhs, const GemmOperand& rhs, const Tensor& out) {
  GemmArgs args;
  args.lhs = lhs;
  args.rhs = rhs;
  args.out = out;
  return args;
}

BulkOverlapMatmul::Result bulk_overlap_matmul_kernel(const BulkOverlapMatmul& call) {
  auto out = allocate(call);
  if (is_shape_only(call.x)) return out;
  const auto& [linear, result] = out;
  auto args =
      product(operand(to_rows(call.x, 0)), transposed_operand(call.weight), linear.flatten(0, -2));
  args.epilogue.bias = contiguous_or_undefined(call.bias);
  run_concurrently(find_comm(kBulkOverlapMatmul, call.comm, call.group_size), call.algorithm,
                   {std::move(args)}, call.other, call.collective,
                   wrap_dim(kBulkOverlapMatmul, call.other, call.dim, "dim"), result);
  return out;
}

// The gradient of `other` is the dual collective, which overlaps the layer's two gradient products.
struct BulkOverlapMatmulBackward {
  using Result = std::tuple<Tensor, Tensor, Tensor>;
  static constexpr const char* kName = "_bulk_overlap_matmul_backward";
  Tensor grad;
  Tensor x;
  Tensor weight;
  Tensor other_grad;
  bool x_wanted;
  bool weight_wanted;
  std::string_view collective;
  std::string_view comm;
  int64_t group_size;
  int64_t dim;
  std::string_view algorithm;
  TORCH_OVERLAP_FIELDS(grad, x, weight, other_grad, x_wanted, weight_wanted, collective, comm,
                       group_size, dim, algorithm);
};

std::string_view dual_collective(std::string_view collective) {
  return gathers(collective) ? "reduce_scatter" : "all_gather";
}

BulkOverlapMatmulBackward::Result bulk_overlap_matmul_backward_kernel(
    const BulkOverlapMatmulBackward& call) {
  const auto& [x, weight] = std::tie(call.x, call.weight);
  const auto collective = dual_collective(call.collective);
  BulkOverlapMatmulBackward::Result out{
      empty_if(call.x_wanted, x.sym_sizes(), x.options()),
      empty_if(call.weight_wanted, weight.sym_sizes(), weight.options()),
      collective_out(call.other_grad, collective, call.group_size, call.dim)};
  if (is_shape_only(x)) return out;
  const auto& [x_grad, weight_grad, other] = out;
  const auto grad_rows = to_rows(call.grad, 0);
  std::vector<GemmArgs> products;
  if (call.x_wanted) {
    products.push_back(product(operand(grad_rows), operand(weight), x_grad.flatten(0, -2)));
  }
  if (call.weight_wanted) {
    products.push_back(product(transposed_operand(grad_rows), operand(to_rows(x, 0)), weight_grad));
  }
  run_concurrently(find_comm(kBulkOverlapMatmul, call.comm, call.group_size), call.algorithm,
                   std::move(products), call.other_grad, collective, call.dim, other);
  return out;
}

}  // namespace

std::vector<Tensor> BulkOverlapMatmul::non_differentiable(const std::vector<Tensor>& results) {
  const Tensor& other = results[1];
  if (other.is_floating_point() || other.is_complex()) return {};
  return {other};
}

void BulkOverlapMatmul::backward(Backward<BulkOverlapMatmul>& pass) {
  const BulkOverlapMatmul& call = pass.call;
  const auto& [grad, other_grad] = std::tie(pass.grads[0], pass.grads[1]);
  if (grad.defined() && pass.wants(call.bias)) {
    pass.set(call.bias, grad.flatten(0, -2).sum(0));
  }
  const bool x_wanted = grad.defined() && pass.wants(call.x);
  const bool weight_wanted = grad.defined() && pass.wants(call.weight);
  const bool other_wanted = other_grad.defined() && pass.wants(call.other);
  // `other` was not saved; its gradient's shape has the same dimensions.
  const int64_t dim = call.dim < 0 && other_wanted ? call.dim + other_grad.dim() : call.dim;
  if (other_wanted && (x_wanted || weight_wanted) && !at::GradMode::is_enabled()) {
    auto [x_grad, weight_grad, own_grad] =
        Operator<BulkOverlapMatmulBackward>::dispatch({.grad = grad,
                                                       .x = call.x,
                                                       .weight = call.weight,
                                                       .other_grad = other_grad,
                                                       .x_wanted = x_wanted,
                                                       .weight_wanted = weight_wanted,
                                                       .collective = call.collective,
                                                       .comm = call.comm,
                                                       .group_size = call.group_size,
                                                       .dim = dim,
                                                       .algorithm = call.algorithm});
    if (x_wanted) pass.set(call.x, std::move(x_grad));
    if (weight_wanted) pass.set(call.weight, std::move(weight_grad));
    pass.set(call.other, std::move(own_grad));
    return;
  }
  if (other_wanted) {
    pass.set(call.other,
             gathers(call.collective)
                 ? ops::reduce_scatter(other_grad, dim, "sum", call.comm, call.group_size)
                 : ops::all_gather(other_grad, dim, call.comm, call.group_size));
  }
  if (x_wanted) pass.set(call.x, grad.matmul(call.weight));
  if (weight_wanted) pass.set(call.weight, grad.flatten(0, -2).t().mm(call.x.flatten(0, -2)));
}

BulkOverlapMatmul::Result bulk_overlap_matmul(const BulkOverlapMatmul& call) {
  return Operator<BulkOverlapMatmul>::dispatch(call);
}

TORCH_OVERLAP_OPERATOR(BulkOverlapMatmul, bulk_overlap_matmul_kernel)
TORCH_OVERLAP_AUTOGRAD(BulkOverlapMatmul, autograd_kernel<BulkOverlapMatmul>)
TORCH_OVERLAP_AUTOCAST(BulkOverlapMatmul)
TORCH_OVERLAP_OPERATOR(BulkOverlapMatmulBackward, bulk_overlap_matmul_backward_kernel)

}  // namespace torch_overlap::ops
