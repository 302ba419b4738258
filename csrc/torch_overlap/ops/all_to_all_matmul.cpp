#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include "torch_overlap/ops/exchange.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kAllToAllMatmul = "all_to_all_matmul";

// Allocates linear(all_to_all(x, 0, -1), weight, bias): x [tokens, ..., k / size].
Tensor all_to_all_matmul_out(const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias, int64_t group_size,
                             std::string_view algorithm) {
  check_group_size(kAllToAllMatmul, group_size);
  check_exchange_algorithm(kAllToAllMatmul, algorithm);
  TORCH_OVERLAP_CHECK(x.dim() >= 2, kValue, kAllToAllMatmul,
                      ": expected x [tokens, ..., features] of two or more dimensions, got shape ",
                      x.sym_sizes(), ". Use x.unsqueeze(0).");
  check_divisible(kAllToAllMatmul, x, 0, group_size);
  check_weight(kAllToAllMatmul, x, weight, /*index=*/-1, /*ranks=*/group_size);
  if (bias) check_bias(kAllToAllMatmul, x, *bias, weight);
  auto sizes = x.sym_sizes().vec();
  sizes[0] = sizes[0] / group_size;
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, x.options());
}

Tensor all_to_all_matmul_kernel(const Tensor& x, const Tensor& weight,
                                const std::optional<Tensor>& bias, std::string_view comm,
                                int64_t group_size, std::string_view algorithm) {
  auto out = all_to_all_matmul_out(x, weight, bias, group_size, algorithm);
  const auto communicator = find_comm(kAllToAllMatmul, comm, group_size);
  const auto rows = out.flatten(0, -2);
  const std::vector<Tensor> matrices{to_rows(x, 0)};
  const auto chosen = choose_exchange({.op = kAllToAllMatmul,
                                       .dtype = x.scalar_type(),
                                       .m = matrices[0].size(0),
                                       .n = weight.size(0),
                                       .k = weight.size(1),
                                       .chunk_rows = rows.size(0) / kNumRowPieces,
                                       .gather_bytes = RowExchange::channel_bytes(matrices)},
                                      algorithm, communicator);
  const auto inputs =
      RowExchange::start(kAllToAllMatmul, communicator, matrices, kNumRowPieces, chosen);
  for (size_t step = 0; step < inputs->steps(); ++step) {
    const auto input = inputs->wait(step);
    const ProfilerRange span("chunk_gemm", step);
    const auto [begin, length] = inputs->range(step);
    linear_out(kAllToAllMatmul, rows.narrow(0, begin, length), input, weight, bias,
               /*overlaps_communication=*/length < rows.size(0));
  }
  inputs->finish();
  return out;
}

Tensor all_to_all_matmul_meta(const Tensor& x, const Tensor& weight,
                              const std::optional<Tensor>& bias, std::string_view,
                              int64_t group_size, std::string_view algorithm) {
  return all_to_all_matmul_out(x, weight, bias, group_size, algorithm);
}

// The gradient. With g the gradient of the result and A = all_to_all(x, 0, -1):
//   x: all_to_all(g weight, -1, 0)    weight: g^T A    bias: g summed over rows
// Pipelined: A is exchanged again while the first columns of g weight are computed. Each part of g
// weight travels while the next one is computed, and the last one during the product for the
// weight's gradient.

std::tuple<Tensor, Tensor> all_to_all_gradients_out(const Tensor& x, const Tensor& weight,
                                                    bool x_wanted, bool weight_wanted) {
  return {x_wanted ? at::empty_symint(x.sym_sizes(), x.options()) : at::empty({0}, x.options()),
          weight_wanted ? at::empty_symint(weight.sym_sizes(), x.options())
                        : at::empty({0}, x.options())};
}

std::tuple<Tensor, Tensor> all_to_all_gradients_kernel(const Tensor& grad, const Tensor& x,
                                                       const Tensor& weight, bool x_wanted,
                                                       bool weight_wanted, std::string_view comm,
                                                       int64_t group_size,
                                                       std::string_view algorithm) {
  auto [x_grad, weight_grad] = all_to_all_gradients_out(x, weight, x_wanted, weight_wanted);
  const auto communicator = find_comm(kAllToAllMatmul, comm, group_size);
  const auto grad_rows = to_rows(grad, 0);
  const auto x_rows = x_wanted ? x_grad.flatten(0, -2) : Tensor();
  const std::vector<Tensor> matrices =
      weight_wanted ? std::vector<Tensor>{to_rows(x, 0)} : std::vector<Tensor>();
  const auto chosen = choose_exchange(
      {.op = kAllToAllMatmul,
       .dtype = x.scalar_type(),
       .m = grad_rows.size(0) * group_size,
       .n = weight.size(0),
       .k = weight.size(1),
       .chunk_rows = grad_rows.size(0),
       .gather_bytes = RowExchange::channel_bytes(matrices),
       .scatter_bytes =
           x_wanted ? ColumnExchange::channel_bytes({static_cast<int64_t>(x_rows.nbytes())}) : 0},
      algorithm, communicator);
  std::unique_ptr<RowExchange> inputs;
  if (weight_wanted) {
    inputs = RowExchange::start(kAllToAllMatmul, communicator, matrices, /*pieces=*/1, chosen);
  }
  std::unique_ptr<ColumnExchange> outputs;
  if (x_wanted && chosen != Algorithm::sequential) {
    outputs = ColumnExchange::start(kAllToAllMatmul, communicator, {x_rows}, chosen);
    for (size_t step = 0; step < outputs->steps(); ++step) {
      {
        const ProfilerRange span("chunk_gemm", step);
        auto part = outputs->part(0, step);
        at::mm_out(part, grad_rows,
                   weight.narrow(1, outputs->chunk(step) * part.size(1), part.size(1)));
      }
      outputs->send(0, step);
    }
  } else if (x_wanted) {
    all_to_all_columns(*communicator, at::mm(grad_rows, weight), x_rows);
  }
  if (weight_wanted) {
    at::mm_out(weight_grad, grad_rows.t(), inputs->wait_all());
    inputs->finish();
  }
  if (outputs) outputs->wait_all();
  return {std::move(x_grad), std::move(weight_grad)};
}

std::tuple<Tensor, Tensor> all_to_all_gradients_meta(const Tensor&, const Tensor& x,
                                                     const Tensor& weight, bool x_wanted,
                                                     bool weight_wanted, std::string_view, int64_t,
                                                     std::string_view) {
  return all_to_all_gradients_out(x, weight, x_wanted, weight_wanted);
}

class AllToAllMatmul : public Function<AllToAllMatmul> {
 public:
  static constexpr bool is_traceable = true;

  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& weight,
                        const std::optional<Tensor>& bias, std::string_view comm,
                        int64_t group_size, std::string_view algorithm) {
    const BelowAutograd guard;
    auto out = ops::all_to_all_matmul(x, weight, bias, comm, group_size, algorithm);
    ctx->save_for_backward({x, weight});
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["algorithm"] = std::string(algorithm);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto& [x, weight] = std::tie(saved[0], saved[1]);
    variable_list result(6);
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) {
      result[2] = grads[0].flatten(0, -2).sum(0);
    }
    const bool x_wanted = ctx->needs_input_grad(0);
    const bool weight_wanted = ctx->needs_input_grad(1);
    if (!x_wanted && !weight_wanted) return result;
    const auto& comm = ctx->saved_data["comm"].toStringRef();
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    const auto& algorithm = ctx->saved_data["algorithm"].toStringRef();
    if (at::GradMode::is_enabled()) {  // double backward may be requested
      if (x_wanted) {
        result[0] = ops::matmul_all_to_all(grads[0], {weight.t()}, OptionalTensors(), comm,
                                           group_size, algorithm)[0];
      }
      if (weight_wanted) {
        const auto inputs = ops::all_to_all(x, 0, -1, comm, group_size);
        result[1] = grads[0].flatten(0, -2).t().mm(inputs.flatten(0, -2));
      }
      return result;
    }
    static const auto gradients =
        find_op<decltype(all_to_all_gradients_kernel)>("_all_to_all_matmul_backward");
    auto [x_grad, weight_grad] =
        gradients.call(grads[0], x, weight, x_wanted, weight_wanted, comm, group_size, algorithm);
    if (x_wanted) result[0] = std::move(x_grad);
    if (weight_wanted) result[1] = std::move(weight_grad);
    return result;
  }
};

Tensor all_to_all_matmul_autograd(const Tensor& x, const Tensor& weight,
                                  const std::optional<Tensor>& bias, std::string_view comm,
                                  int64_t group_size, std::string_view algorithm) {
  const auto present = bias && bias->defined() ? bias : std::nullopt;
  if (needs_autograd(x) || needs_autograd(weight) || (present && needs_autograd(*present))) {
    return AllToAllMatmul::apply(x, weight, present, comm, group_size, algorithm);
  }
  const BelowAutograd guard;
  return ops::all_to_all_matmul(x, weight, present, comm, group_size, algorithm);
}

}  // namespace

Tensor all_to_all_matmul(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                         std::string_view comm, int64_t group_size, std::string_view algorithm) {
  static const auto handle = find_op<decltype(all_to_all_matmul_kernel)>("all_to_all_matmul");
  return handle.call(x, weight, bias, comm, group_size, algorithm);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "all_to_all_matmul(Tensor x, Tensor weight, Tensor? bias, str comm, int group_size,"
      " str algorithm=\"auto\") -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "_all_to_all_matmul_backward(Tensor grad, Tensor x, Tensor weight, bool x_wanted,"
      " bool weight_wanted, str comm, int group_size, str algorithm) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("all_to_all_matmul", torch_overlap::ops::all_to_all_matmul_kernel);
  m.impl("_all_to_all_matmul_backward", torch_overlap::ops::all_to_all_gradients_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("all_to_all_matmul", torch_overlap::ops::all_to_all_matmul_meta);
  m.impl("_all_to_all_matmul_backward", torch_overlap::ops::all_to_all_gradients_meta);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("all_to_all_matmul", torch_overlap::ops::all_to_all_matmul_autograd);
}
