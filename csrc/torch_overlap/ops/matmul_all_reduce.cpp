#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "torch_overlap/common/views.h"
#include "torch_overlap/ops/gemm_all_reduce.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kMatmulAllReduce = "matmul_all_reduce";

// Allocates the sum (or mean) of all ranks' x weight^T, plus bias.
Tensor matmul_all_reduce_out(const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias, int64_t group_size,
                             std::string_view op, std::string_view algorithm) {
  check_group_size(kMatmulAllReduce, group_size);
  check_algorithm(kMatmulAllReduce, algorithm);
  check_choice(kMatmulAllReduce, "op", "sum avg", op);
  TORCH_OVERLAP_CHECK(x.dim() >= 2, kValue, kMatmulAllReduce,
                      ": expected x of two or more dimensions, got shape ", x.sym_sizes(),
                      "; use x.unsqueeze(0)");
  check_weight(kMatmulAllReduce, x, weight);
  if (bias) check_bias(kMatmulAllReduce, x, *bias, weight);
  auto sizes = x.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, x.options());
}

Tensor matmul_all_reduce_kernel(const Tensor& x, const Tensor& weight,
                                const std::optional<Tensor>& bias, std::string_view comm,
                                int64_t group_size, std::string_view op,
                                std::string_view algorithm) {
  auto out = matmul_all_reduce_out(x, weight, bias, group_size, op, algorithm);
  const auto communicator = find_comm(kMatmulAllReduce, comm, group_size);
  const auto inputs = to_rows(x, 0);
  const auto rows = as_rows(out);
  const auto chosen = matmul_all_reduce_algorithm(communicator, inputs, weight.size(0), algorithm);
  run_gemm_all_reduce({.op = kMatmulAllReduce,
                       .comm = communicator,
                       .out = rows,
                       .bias = bias.value_or(Tensor()),
                       .mean = op == "avg",
                       .multiply =
                           [&](const RowRange& range, const Tensor& to) {
                             linear_out(kMatmulAllReduce, to,
                                        row_view(inputs, range.begin, range.length), weight,
                                        std::nullopt,
                                        /*overlaps_communication=*/range.length < inputs.size(0));
                           },
                       .arguments =
                           [&](const RowRange& range) {
                             GemmArgs args;
                             args.lhs = operand(row_view(inputs, range.begin, range.length));
                             args.rhs = transposed_operand(weight);
                             return args;
                           }},
                      chosen);
  return out;
}

Tensor matmul_all_reduce_meta(const Tensor& x, const Tensor& weight,
                              const std::optional<Tensor>& bias, std::string_view,
                              int64_t group_size, std::string_view op, std::string_view algorithm) {
  return matmul_all_reduce_out(x, weight, bias, group_size, op, algorithm);
}

// The gradient, P -> R.
//
// With g the gradient and A = all_reduce(g):
//   x: A weight    weight: A^T x    bias: g summed over rows
// Pipelined: the pieces of g are reduced in the background while the rows of x's gradient are
// computed.

bool gradient_is_pipelined(const std::shared_ptr<TorchComm>& comm, const Tensor& sum,
                           std::string_view algorithm) {
  // The operand of the reduction exists before the product, so channels have no use here.
  const bool uses_channels = algorithm == "p2p" || algorithm == "fused";
  const auto without_channels = uses_channels                ? "pipelined"
                                : algorithm == "low_latency" ? "sequential"
                                                             : forward_algorithm(algorithm);
  return choose_algorithm({.op = kMatmulAllReduce,
                           .dtype = sum.scalar_type(),
                           .chunk_rows = sum.size(0) / kNumAllReduceChunks,
                           .prefers_channels = false},
                          without_channels, comm) != Algorithm::sequential;
}

std::tuple<Tensor, Tensor> gradients_out(const Tensor& x, const Tensor& weight, bool x_wanted,
                                         bool weight_wanted) {
  return {x_wanted ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options()),
          weight_wanted ? at::empty_symint(weight.sym_sizes(), x.options())
                        : at::empty({0}, x.options())};
}

std::tuple<Tensor, Tensor> gradients_kernel(const Tensor& grad, const Tensor& x,
                                            const Tensor& weight, bool x_wanted, bool weight_wanted,
                                            std::string_view comm, int64_t group_size,
                                            std::string_view op, std::string_view algorithm) {
  auto [x_grad, weight_grad] = gradients_out(x, weight, x_wanted, weight_wanted);
  const auto communicator = find_comm(kMatmulAllReduce, comm, group_size);
  const RedOpType reduction = op == "avg" ? RedOpType::AVG : RedOpType::SUM;
  const auto sum = grad.flatten(0, -2).clone(at::MemoryFormat::Contiguous);
  Tensor x_rows = x_wanted ? x_grad.flatten(0, -2) : Tensor();
  if (!gradient_is_pipelined(communicator, sum, algorithm)) {
    communicator->all_reduce(sum, reduction, /*async_op=*/false);
    if (x_wanted) at::mm_out(x_rows, sum, weight);
  } else {
    const auto chunks = row_chunks(sum.size(0), kNumAllReduceChunks);
    std::vector<WorkPtr> works;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const ProfilerRange span("chunk_comm", i);
      works.push_back(communicator->all_reduce(sum.narrow(0, chunks[i].begin, chunks[i].length),
                                               reduction, /*async_op=*/true));
    }
    for (size_t i = 0; i < chunks.size(); ++i) {
      {
        const ProfilerRange span("chunk_wait", i);
        works[i]->wait();
      }
      if (!x_wanted) continue;
      const ProfilerRange span("chunk_gemm", i);
      auto chunk = x_rows.narrow(0, chunks[i].begin, chunks[i].length);
      at::mm_out(chunk, sum.narrow(0, chunks[i].begin, chunks[i].length), weight);
    }
  }
  if (weight_wanted) at::mm_out(weight_grad, sum.t(), to_rows(x, 0));
  return {std::move(x_grad), std::move(weight_grad)};
}

std::tuple<Tensor, Tensor> gradients_meta(const Tensor&, const Tensor& x, const Tensor& weight,
                                          bool x_wanted, bool weight_wanted, std::string_view,
                                          int64_t, std::string_view, std::string_view) {
  return gradients_out(x, weight, x_wanted, weight_wanted);
}

class MatmulAllReduce : public Function<MatmulAllReduce> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias, std::string_view comm,
                        int64_t group_size, std::string_view op, std::string_view algorithm) {
    const BelowAutograd guard;
    auto out = ops::matmul_all_reduce(x, weight, bias, comm, group_size, op, algorithm);
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["op"] = std::string(op);
    ctx->saved_data["algorithm"] = std::string(algorithm);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    variable_list result(7);
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) {
      result[2] = grads[0].flatten(0, -2).sum(0);
    }
    const bool x_wanted = ctx->needs_input_grad(0);
    const bool weight_wanted = ctx->needs_input_grad(1);
    if (!x_wanted && !weight_wanted) return result;
    const auto& comm = ctx->saved_data["comm"].toStringRef();
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    const auto& op = ctx->saved_data["op"].toStringRef();
    if (at::GradMode::is_enabled()) {  // double backward may be requested
      const auto sum = ops::all_reduce(grads[0], op, comm, group_size);
      if (x_wanted) result[0] = sum.matmul(saved[1]);
      if (weight_wanted) result[1] = sum.flatten(0, -2).t().mm(saved[0].flatten(0, -2));
      return result;
    }
    static const auto gradients =
        find_op<decltype(gradients_kernel)>("_matmul_all_reduce_backward");
    auto [x_grad, weight_grad] =
        gradients.call(grads[0], saved[0], saved[1], x_wanted, weight_wanted, comm, group_size, op,
                       ctx->saved_data["algorithm"].toStringRef());
    if (x_wanted) result[0] = std::move(x_grad);
    if (weight_wanted) result[1] = std::move(weight_grad);
    return result;
  }
};

Tensor matmul_all_reduce_autograd(const Tensor& x, const Tensor& weight,
                                  const std::optional<Tensor>& bias, std::string_view comm,
                                  int64_t group_size, std::string_view op,
                                  std::string_view algorithm) {
  const auto present = bias && bias->defined() ? bias : std::nullopt;
  if (needs_autograd(x) || needs_autograd(weight) || (present && needs_autograd(*present))) {
    return MatmulAllReduce::apply(x, weight, present, comm, group_size, op, algorithm);
  }
  const BelowAutograd guard;
  return ops::matmul_all_reduce(x, weight, present, comm, group_size, op, algorithm);
}

}  // namespace

Algorithm matmul_all_reduce_algorithm(const std::shared_ptr<TorchComm>& comm, const Tensor& rows,
                                      int64_t features, std::string_view asked) {
  const auto problem = gemm_all_reduce_problem(kMatmulAllReduce, *comm, rows.size(0), features,
                                               rows.size(1), rows.scalar_type());
  return choose_algorithm(problem, forward_algorithm(asked), comm);
}

Tensor matmul_all_reduce(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                         std::string_view comm, int64_t group_size, std::string_view op,
                         std::string_view algorithm) {
  static const auto handle = find_op<decltype(matmul_all_reduce_kernel)>("matmul_all_reduce");
  return handle.call(x, weight, bias, comm, group_size, op, algorithm);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "matmul_all_reduce(Tensor x, Tensor weight, Tensor? bias, str comm, int group_size,"
      " str op=\"sum\", str algorithm=\"auto\") -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_matmul_all_reduce_backward(Tensor grad, Tensor x, Tensor weight, bool x_wanted,"
      " bool weight_wanted, str comm, int group_size, str op, str algorithm) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("matmul_all_reduce", torch_overlap::ops::matmul_all_reduce_kernel);
  m.impl("_matmul_all_reduce_backward", torch_overlap::ops::gradients_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("matmul_all_reduce", torch_overlap::ops::matmul_all_reduce_meta);
  m.impl("_matmul_all_reduce_backward", torch_overlap::ops::gradients_meta);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("matmul_all_reduce", torch_overlap::ops::matmul_all_reduce_autograd);
}
