#include "torch_overlap/ops/all_gather_matmul_backward.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eye.h>

#include <utility>

#include "torch_overlap/ops/operator.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/regather.h"
#include "torch_overlap/ops/rows.h"

namespace torch_overlap::ops {
namespace {

// Name of the operator in error messages.
constexpr std::string_view kAllGatherMatmulBackward = AllGatherMatmul::kName;

// With g_i the gradient of product i and G = all_gather(x):
//   x:          reduce_scatter(sum_i g_i w_i  [+ the gradient of the gathered x])
//   weights[i]: g_i^T G          biases[i]: g_i summed over rows
//
// p2p and pipelined: G is gathered (unless it was saved, or its gather was started before) while
// the first products are computed, each partial product travels while the next one is computed, and
// the last ones while the products for the weights are. bulk: the gather overlaps the whole
// product, and the reduction of that product overlaps the products for the weights.

AllGatherMatmulBackward::Result allocate(const AllGatherMatmulBackward& call) {
  const Tensor& x = call.x;
  std::vector<Tensor> weight_grads;
  for (const int64_t i : call.wanted) {
    if (!call.main_grads.empty()) break;
    weight_grads.push_back(at::empty_symint(call.weights[i].sym_sizes(), x.options()));
  }
  return {empty_if(call.x_wanted, x.sym_sizes(), x.options()), std::move(weight_grads)};
}

// The sum of terms that is x's gradient before the reduction: products, and what is added to them.
struct TermsOfX {
  std::vector<GemmArgs> products;
  Tensor start;  // undefined: nothing is added
};

// Several 16-bit terms are multiplied as one concatenated product, which is rounded once. So are
// all terms of a fused kernel, which computes one product and adds nothing to it: the gradient of
// the gathered x is then multiplied by an identity (an infinity in it becomes NaN in its row).
TermsOfX terms_of_x(const AllGatherMatmulBackward& call, const Tensor& own,
                    const std::vector<Tensor>& grad_rows, bool is_fused) {
  std::vector<Tensor> grads = grad_rows;
  std::vector<Tensor> weights = call.weights;
  TermsOfX terms;
  if (call.gathered_grad) terms.start = to_rows(*call.gathered_grad, call.gather_dim);
  if (is_fused && terms.start.defined()) {
    grads.push_back(std::exchange(terms.start, {}));
    weights.push_back(at::eye(own.size(1), own.options()));
  }
  if (grads.size() > 1 && (is_fused || c10::isReducedFloatingType(call.x.scalar_type()))) {
    grads = {at::cat(grads, 1)};
    weights = {at::cat(weights, 0)};
  }
  if (grads.empty()) {  // only the gathered x was used: nothing is added to its gradient
    grads = {at::empty({call.group_size * own.size(0), 0}, own.options())};
    weights = {at::empty({0, own.size(1)}, own.options())};
  }
  for (size_t i = 0; i < grads.size(); ++i) {
    GemmArgs args;
    args.lhs = operand(grads[i]);
    args.rhs = operand(weights[i]);
    args.overlaps_communication = true;
    terms.products.push_back(std::move(args));
  }
  return terms;
}

// Does not depend on which results this rank's loss uses: ranks may differ in that, and must choose
// the same algorithm. A rank that uses no product has the same k as for an identity alone.
// Measurements are by the shape of the layer, apart for a pass that gathers x and one that
// `has_rows`.
OverlapProblem problem_of_backward(const AllGatherMatmulBackward& call, const TorchComm& comm,
                                   const Tensor& own, bool gathers, bool has_rows) {
  const int64_t rows = own.size(0);
  const auto dtype = call.x.scalar_type();
  int64_t features = 0;
  for (const auto& weight : call.weights) features += weight.size(0);
  if (call.weights.empty()) features = own.size(1);
  const GemmShape shape{rows * call.group_size, call.features * call.group_size, own.size(1)};
  return {
      .op = kAllGatherMatmulBackward,
      .dtype = dtype,
      .global_shape = shape,
      .measured_as =
          has_rows ? "all_gather_matmul_backward_gathered" : "all_gather_matmul_backward",
      .chunk_rows = rows,
      .gather_bytes = gathers ? std::optional(gather_bytes(comm, own)) : std::nullopt,
      .reduce_scatter_bytes = call.x_wanted ? std::optional(reduce_scatter_bytes(
                                                  comm, call.group_size * rows, own.size(1), dtype))
                                            : std::nullopt,
      .fused = FusedProducts{.n = {own.size(1)}, .k = features, .types = FusedTypes::all(dtype)},
      .can_pipeline = is_channel_dtype(dtype)};
}

AllGatherMatmulBackward::Result all_gather_matmul_backward_kernel(
    const AllGatherMatmulBackward& call) {
  auto out = allocate(call);
  if (is_shape_only(call.x)) return out;
  auto& [x_grad, weight_grads] = out;
  const int64_t dim = call.gather_dim;
  const auto comm = find_comm(kAllGatherMatmulBackward, call.comm, call.group_size);
  const auto own = to_rows(call.x, dim);
  // The rows of all ranks, valid after the gather has finished.
  Tensor inputs;
  if (call.gathered) {
    inputs = to_rows(*call.gathered, dim);
  } else if (const auto early = take_regathered(comm, call.x, dim)) {
    inputs = *early;
  }
  const bool gathers = !call.wanted.empty() && !inputs.defined();
  std::vector<Tensor> grad_rows;
  for (const auto& grad : call.grads) grad_rows.push_back(to_rows(grad, dim));
  // No kernel of few rows serves the gradient.
  const auto asked = call.algorithm == "low_latency" ? "sequential" : call.algorithm;
  const auto algorithm =
      choose_algorithm(problem_of_backward(call, *comm, own, gathers, inputs.defined()), asked,
                       comm)
          .value_or(Algorithm::sequential);

  std::optional<ChannelGather> gather;
  if (gathers) {
    if (algorithm == Algorithm::sequential) {
      inputs = at::empty({call.group_size * own.size(0), own.size(1)}, own.options());
      comm->all_gather_single(inputs, own, /*async_op=*/false);
    } else {
      gather.emplace(kAllGatherMatmulBackward, comm, own, algorithm);
      inputs = gather->rows();
    }
  }
  std::vector<GemmArgs> weight_gemms;
  std::vector<Product> weight_products;  // checked before anything more is sent
  for (size_t i = 0; i < call.wanted.size(); ++i) {
    const Tensor& rows = grad_rows[call.wanted[i]];
    if (!call.main_grads.empty()) {
      for (auto& args : products_into(call.main_grads[i], rows, inputs)) {
        weight_gemms.push_back(std::move(args));
      }
      continue;
    }
    GemmArgs args;
    args.lhs = operand(rows.t());
    args.rhs = {.data = inputs};
    args.out = weight_grads[i];
    weight_gemms.push_back(std::move(args));
  }
  for (const GemmArgs& args : weight_gemms) {
    weight_products.emplace_back(kAllGatherMatmulBackward, args);
  }
  const auto multiply_weights = [&] {
    if (gather) gather->finish();
    for (const Product& product : weight_products) product.run();
  };
  if (!call.x_wanted) {
    multiply_weights();
    return out;
  }
  const auto x_rows = writable_rows(x_grad, dim);
  auto terms = terms_of_x(call, own, grad_rows, algorithm == Algorithm::fused);
  ReduceScatterProducts sum{
      .op = kAllGatherMatmulBackward,
      .comm = comm,
      .gemms = std::move(terms.products),
      .start = std::move(terms.start),
      .out = x_rows,
      .ranks_share_k = false};  // the number of output features may differ by rank
  if (algorithm == Algorithm::bulk) {
    run_bulk(
        sum,
        [&] {
          if (gather) gather->finish();
        },
        weight_gemms);
  } else {
    sum.meanwhile = multiply_weights;
    run_reduce_scatter(std::move(sum), algorithm);
  }
  copy_rows_back(x_rows, x_grad, dim);
  return out;
}

TORCH_OVERLAP_OPERATOR(AllGatherMatmulBackward, all_gather_matmul_backward_kernel)

}  // namespace

AllGatherMatmulBackward::Result all_gather_matmul_backward(const AllGatherMatmulBackward& call) {
  if (call.main_grads.empty()) return Operator<AllGatherMatmulBackward>::dispatch(call);
  const BelowAutograd guard;
  return all_gather_matmul_backward_kernel(call);
}

}  // namespace torch_overlap::ops
