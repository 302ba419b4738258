#include <ATen/ops/empty.h>

#include "torch_overlap/common/views.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kMatmulReduceScatter = "matmul_reduce_scatter";

int64_t row_dim(const Tensor& x, int64_t scatter_dim) {
  TORCH_OVERLAP_CHECK(x.dim() >= 2, kValue, kMatmulReduceScatter,
                      ": expected x of two or more dimensions, got shape ", x.sym_sizes(),
                      "; use x.unsqueeze(0)");
  const int64_t dim = wrap_dim(kMatmulReduceScatter, x, scatter_dim, "scatter_dim");
  TORCH_OVERLAP_CHECK(dim + 1 < x.dim(), kValue, kMatmulReduceScatter,
                      ": expected scatter_dim to be a dimension of ", "rows, got ", scatter_dim,
                      ", the features of shape ", x.sym_sizes(),
                      "; use a matmul and reduce_scatter");
  return dim;
}

// Allocates this rank's part, along scatter_dim, of the sum (or mean) of all ranks' x weight^T,
// plus bias.
Tensor matmul_reduce_scatter_out(const Tensor& x, const Tensor& weight,
                                 const std::optional<Tensor>& bias, int64_t group_size,
                                 int64_t scatter_dim, std::string_view op,
                                 std::string_view algorithm) {
  check_group_size(kMatmulReduceScatter, group_size);
  check_algorithm(kMatmulReduceScatter, algorithm);
  check_choice(kMatmulReduceScatter, "op", "sum avg", op);
  const int64_t dim = row_dim(x, scatter_dim);
  check_divisible(kMatmulReduceScatter, x, dim, group_size);
  check_weight(kMatmulReduceScatter, x, weight);
  if (bias) check_bias(kMatmulReduceScatter, x, *bias, weight);
  auto sizes = x.sym_sizes().vec();
  sizes[dim] = sizes[dim] / group_size;
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, x.options());
}

Tensor matmul_reduce_scatter_kernel(const Tensor& x, const Tensor& weight,
                                    const std::optional<Tensor>& bias, std::string_view comm,
                                    int64_t group_size, int64_t scatter_dim, std::string_view op,
                                    std::string_view algorithm) {
  auto out = matmul_reduce_scatter_out(x, weight, bias, group_size, scatter_dim, op, algorithm);
  const auto communicator = find_comm(kMatmulReduceScatter, comm, group_size);
  const int64_t dim = row_dim(x, scatter_dim);
  const auto inputs = to_rows(x, dim);
  const int64_t rows = inputs.size(0) / group_size;
  const bool mean = op == "avg";

  const auto sums = writable_rows(out, dim);

  bool bias_pending = bias.has_value();
  const auto chosen = choose_algorithm(
      {.op = kMatmulReduceScatter,
       .dtype = x.scalar_type(),
       .m = inputs.size(0),
       .n = weight.size(0),
       .k = weight.size(1) * group_size,
       .chunk_rows = rows,
       .scatter_bytes =
           scatter_bytes(*communicator, inputs.size(0), weight.size(0), x.scalar_type()),
       .local_n = weight.size(0),
       .local_k = weight.size(1),
       .low_latency_bytes =
           low_latency_bytes(*communicator, inputs.size(0), weight.size(0), x.scalar_type())},
      forward_algorithm(algorithm), communicator);
  const auto product = [&] {
    GemmArgs args;
    args.lhs = operand(inputs);
    args.rhs = transposed_operand(weight);
    return args;
  };
  if (chosen == Algorithm::low_latency) {
    low_latency_sum_gemm(kMatmulReduceScatter, communicator,
                         {.product = product(),
                          .rows = inputs.size(0),
                          .bias = bias.value_or(Tensor()),
                          .mean = mean,
                          .out = sums});
    bias_pending = false;
  } else if (chosen == Algorithm::p2p || chosen == Algorithm::fused) {
    channel_scatter_gemms(kMatmulReduceScatter, communicator, {product()},
                          {.start = {},
                           .bias = bias.value_or(Tensor()),
                           .mean = mean,
                           .out = sums,
                           .fused = chosen == Algorithm::fused});
    bias_pending = false;
  } else if (chosen != Algorithm::pipelined) {
    const auto product = at::empty({inputs.size(0), weight.size(0)}, x.options());
    linear_out(kMatmulReduceScatter, product, inputs, weight, std::nullopt);
    communicator->reduce_scatter_single(sums, product, mean ? RedOpType::AVG : RedOpType::SUM,
                                        /*async_op=*/false);
  } else {
    ScatterPipeline scatter(*communicator, rows, weight.size(0), x.options());
    for (size_t step = 0; step < scatter.steps(); ++step) {
      {
        const ProfilerRange span("chunk_gemm", step);
        // This rank's partial product is added once, and so is a bias in it. A mean would divide
        // the bias.
        const bool with_bias = scatter.is_own(step) && !mean;
        linear_out(kMatmulReduceScatter, scatter.partial(step),
                   row_view(inputs, scatter.chunk(step) * rows, rows), weight,
                   with_bias ? bias : std::nullopt, /*overlaps_communication=*/true);
      }
      scatter.send(step);
    }
    scatter.reduce(sums, mean);
    bias_pending &= mean;
  }
  copy_rows_back(sums, out, dim);
  if (bias_pending) out.add_(*bias);
  return out;
}

Tensor matmul_reduce_scatter_meta(const Tensor& x, const Tensor& weight,
                                  const std::optional<Tensor>& bias, std::string_view,
                                  int64_t group_size, int64_t scatter_dim, std::string_view op,
                                  std::string_view algorithm) {
  return matmul_reduce_scatter_out(x, weight, bias, group_size, scatter_dim, op, algorithm);
}

// With g the gradient (divided by the group size for a mean) and G = all_gather(g):
//   x: G weight, which is all_gather_matmul(g, weight^T)    weight: G^T x
//   bias: g summed over rows
class MatmulReduceScatter : public Function<MatmulReduceScatter> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias, std::string_view comm,
                        int64_t group_size, int64_t scatter_dim, std::string_view op,
                        std::string_view algorithm) {
    const BelowAutograd guard;
    auto out =
        ops::matmul_reduce_scatter(x, weight, bias, comm, group_size, scatter_dim, op, algorithm);
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["scatter_dim"] = row_dim(x, scatter_dim);
    ctx->saved_data["mean"] = op == "avg";
    ctx->saved_data["algorithm"] = std::string(algorithm);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    variable_list result(8);
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) {
      result[2] = grads[0].flatten(0, -2).sum(0);
    }
    const bool x_wanted = ctx->needs_input_grad(0);
    const bool weight_wanted = ctx->needs_input_grad(1);
    if (!x_wanted && !weight_wanted) return result;
    const auto& comm = ctx->saved_data["comm"].toStringRef();
    const int64_t dim = ctx->saved_data["scatter_dim"].toInt();
    const auto grad = ctx->saved_data["mean"].toBool() ? grads[0].div(group_size) : grads[0];
    Tensor gathered;
    if (x_wanted) {
      auto [products, inputs] = ops::all_gather_matmul(
          grad, {saved[1].t()}, OptionalTensors(), comm, group_size, dim,
          /*return_gathered=*/weight_wanted, ctx->saved_data["algorithm"].toStringRef());
      result[0] = std::move(products[0]);
      gathered = std::move(inputs);
    } else {
      gathered = ops::all_gather(grad, dim, comm, group_size);
    }
    if (weight_wanted) result[1] = gathered.flatten(0, -2).t().mm(saved[0].flatten(0, -2));
    return result;
  }
};

Tensor matmul_reduce_scatter_autograd(const Tensor& x, const Tensor& weight,
                                      const std::optional<Tensor>& bias, std::string_view comm,
                                      int64_t group_size, int64_t scatter_dim, std::string_view op,
                                      std::string_view algorithm) {
  const auto present = bias && bias->defined() ? bias : std::nullopt;
  if (needs_autograd(x) || needs_autograd(weight) || (present && needs_autograd(*present))) {
    return MatmulReduceScatter::apply(x, weight, present, comm, group_size, scatter_dim, op,
                                      algorithm);
  }
  const BelowAutograd guard;
  return ops::matmul_reduce_scatter(x, weight, present, comm, group_size, scatter_dim, op,
                                    algorithm);
}

}  // namespace

Tensor matmul_reduce_scatter(const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias, std::string_view comm,
                             int64_t group_size, int64_t scatter_dim, std::string_view op,
                             std::string_view algorithm) {
  static const auto handle =
      find_op<decltype(matmul_reduce_scatter_kernel)>("matmul_reduce_scatter");
  return handle.call(x, weight, bias, comm, group_size, scatter_dim, op, algorithm);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "matmul_reduce_scatter(Tensor x, Tensor weight, Tensor? bias, str comm, int group_size,"
      " int scatter_dim=0, str op=\"sum\", str algorithm=\"auto\") -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("matmul_reduce_scatter", torch_overlap::ops::matmul_reduce_scatter_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("matmul_reduce_scatter", torch_overlap::ops::matmul_reduce_scatter_meta);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("matmul_reduce_scatter", torch_overlap::ops::matmul_reduce_scatter_autograd);
}
