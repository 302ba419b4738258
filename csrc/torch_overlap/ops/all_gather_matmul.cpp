#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include "torch_overlap/ops/all_gather_matmul_backward.h"
#include "torch_overlap/ops/autograd.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/rows.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kAllGatherMatmul = AllGatherMatmul::kName;

// The memory of products[i] = all_gather(x, gather_dim) weights[i]^T + biases[i], and of the
// gathered x or an empty tensor.
AllGatherMatmul::Result allocate(const AllGatherMatmul& call, int64_t dim) {
  const auto& [x, weights, biases] = std::tie(call.x, call.weights, call.biases);
  check_weight_count(kAllGatherMatmul, weights.size(), biases.size());
  const auto* const given = call.into;
  TORCH_OVERLAP_CHECK(given == nullptr || std::get<0>(*given).size() == weights.size(), kValue,
                      kAllGatherMatmul, ": expected memory for ", weights.size(),
                      " products, got it for ", std::get<0>(*given).size(), ". Pass all.");
  auto sizes = x.sym_sizes().vec();
  sizes[dim] *= call.group_size;
  auto gathered =
      call.return_gathered
          ? result_memory(kAllGatherMatmul, "the gathered x",
                          given != nullptr ? &std::get<1>(*given) : nullptr, sizes, x.options())
          : at::empty({0}, x.options());
  std::vector<Tensor> products;
  for (size_t i = 0; i < weights.size(); ++i) {
    check_weight(kAllGatherMatmul, x, weights[i], static_cast<int64_t>(i));
    sizes.back() = weights[i].sym_size(0);
    const auto bias = optional_at(biases, i);
    if (bias) check_bias(kAllGatherMatmul, x, *bias, weights[i], static_cast<int64_t>(i));
    products.push_back(result_memory(kAllGatherMatmul, "a product",
                                     given != nullptr ? &std::get<0>(*given)[i] : nullptr, sizes,
                                     x.options()));
  }
  return {std::move(products), std::move(gathered)};
}

AllGatherMatmul::Result all_gather_matmul_kernel(const AllGatherMatmul& call) {
  check_group_size(kAllGatherMatmul, call.group_size);
  check_algorithm(kAllGatherMatmul, call.algorithm);
  const int64_t dim = check_row_dim(kAllGatherMatmul, call.x, call.gather_dim, "gather_dim");
  auto out = allocate(call, dim);
  if (is_shape_only(call.x)) return out;
  (void)split_main_grads(kAllGatherMatmul, call.main_grads, call.weights, call.x);
  auto& [results, gathered] = out;
  GatherProducts products{.op = kAllGatherMatmul,
                          .comm = find_comm(kAllGatherMatmul, call.comm, call.group_size),
                          .own = to_rows(call.x, dim)};
  if (call.return_gathered) products.gathered = writable_rows(gathered, dim);
  for (size_t i = 0; i < results.size(); ++i) {
    GemmArgs args;
    args.rhs = transposed_operand(call.weights[i]);
    args.out = writable_rows(results[i], dim);
    args.epilogue.bias = contiguous_or_undefined(optional_at(call.biases, i));
    products.gemms.push_back(std::move(args));
  }
  const auto algorithm = choose_forward(problem_of(products), call.algorithm, products.comm);
  if (!algorithm) return out;
  run_gather(products, *algorithm);
  for (size_t i = 0; i < results.size(); ++i) {
    copy_rows_back(products.gemms[i].out, results[i], dim);
  }
  if (call.return_gathered) copy_rows_back(products.gathered, gathered, dim);
  return out;
}

}  // namespace

std::vector<Tensor> AllGatherMatmul::saved_results(const AllGatherMatmul& call,
                                                   const std::vector<Tensor>& results) {
  return call.return_gathered ? std::vector{results.back()} : std::vector<Tensor>();
}

void AllGatherMatmul::backward(Backward<AllGatherMatmul>& pass) {
  const AllGatherMatmul& call = pass.call;
  const auto gathered =
      pass.saved_results.empty() ? std::nullopt : std::optional(pass.saved_results[0]);
  const Tensor gathered_grad = gathered ? pass.grads.back() : Tensor();
  const int64_t dim = call.gather_dim < 0 ? call.gather_dim + call.x.dim() : call.gather_dim;
  // The products that were used; and those of them whose weight needs a gradient, as indices of
  // used_grads and of call.weights.
  std::vector<Tensor> used_grads;
  std::vector<Tensor> used_weights;
  std::vector<int64_t> wanted;
  std::vector<size_t> wanted_weights;
  for (size_t i = 0; i < call.weights.size(); ++i) {
    const Tensor& grad = pass.grads[i];
    if (!grad.defined()) continue;
    if (pass.wants(call.weights, i)) {
      wanted.push_back(static_cast<int64_t>(used_grads.size()));
      wanted_weights.push_back(i);
    }
    if (pass.wants(call.biases, i)) pass.set(call.biases, grad.flatten(0, -2).sum(0), i);
    used_grads.push_back(grad);
    used_weights.push_back(call.weights[i]);
  }
  const bool x_wanted = pass.wants(call.x) && (!used_grads.empty() || gathered_grad.defined());
  if (!x_wanted && wanted.empty()) return;
  WeightBuffers main_grads;
  if (auto all = split_main_grads(kAllGatherMatmul, call.main_grads, call.weights, call.x);
      !all.empty() && !wanted.empty()) {
    auto multiplied = used_grads;
    multiplied.push_back(call.x);
    check_may_add(kAllGatherMatmul, multiplied);
    for (const size_t i : wanted_weights) main_grads.push_back(std::move(all[i]));
  }

  if (at::GradMode::is_enabled()) {  // double backward may be requested
    if (x_wanted) {
      // Ranks may differ in the number of features, and "fused" would then choose differently.
      const bool may_differ = call.algorithm == "auto" || call.algorithm == "fused";
      Tensor sum;
      if (gathered) {  // possibly used by only some ranks
        const Tensor term = gathered_grad.defined() ? gathered_grad : at::zeros_like(*gathered);
        sum = ops::reduce_scatter(term, dim, "sum", call.comm, call.group_size);
      }
      for (size_t i = 0; i < used_grads.size(); ++i) {
        const auto part =
            ops::matmul_reduce_scatter({.x = used_grads[i],
                                        .weight = used_weights[i].t(),
                                        .comm = call.comm,
                                        .group_size = call.group_size,
                                        .scatter_dim = dim,
                                        .algorithm = may_differ ? "sequential" : call.algorithm});
        sum = sum.defined() ? sum.add(part) : part;
      }
      pass.set(call.x, sum);
    }
    if (wanted.empty()) return;
    const auto inputs =
        gathered ? *gathered : ops::all_gather(call.x, dim, call.comm, call.group_size);
    for (size_t i = 0; i < wanted.size(); ++i) {
      pass.set(call.weights, used_grads[wanted[i]].flatten(0, -2).t().mm(inputs.flatten(0, -2)),
               wanted_weights[i]);
    }
    return;
  }

  int64_t features = 0;
  for (const Tensor& weight : call.weights) {
    features += weight.sym_size(0).guard_int(__FILE__, __LINE__);
  }
  auto [x_grad, weight_grads] = all_gather_matmul_backward(
      {.grads = used_grads,
       .x = call.x,
       .weights = used_weights,
       .gathered = gathered,
       .gathered_grad = gathered_grad.defined() ? std::optional(gathered_grad) : std::nullopt,
       .x_wanted = x_wanted,
       .wanted = wanted,
       .comm = call.comm,
       .group_size = call.group_size,
       .gather_dim = dim,
       .features = features,
       .algorithm = call.algorithm,
       .main_grads = std::move(main_grads)});
  if (x_wanted) pass.set(call.x, std::move(x_grad));
  for (size_t i = 0; i < weight_grads.size(); ++i) {
    pass.set(call.weights, std::move(weight_grads[i]), wanted_weights[i]);
  }
}

AllGatherMatmul::Result all_gather_matmul(const AllGatherMatmul& call) {
  return Operator<AllGatherMatmul>::dispatch(call);
}

void all_gather_matmul_into(AllGatherMatmul call, const AllGatherMatmul::Result& results) {
  const BelowAutograd guard;
  call.into = &results;
  (void)all_gather_matmul_kernel(call);
}

TORCH_OVERLAP_OPERATOR(AllGatherMatmul, all_gather_matmul_kernel)
TORCH_OVERLAP_AUTOGRAD(AllGatherMatmul, autograd_kernel<AllGatherMatmul>)
TORCH_OVERLAP_AUTOCAST(AllGatherMatmul)

}  // namespace torch_overlap::ops
