#include <ATen/ops/empty.h>

#include "torch_overlap/common/views.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/pipeline.h"
#include "torch_overlap/ops/register.h"

namespace torch_overlap::ops {
namespace {

constexpr std::string_view kAllGatherMatmul = "all_gather_matmul";

struct Outputs {
  std::vector<Tensor> products;
  Tensor gathered;
};

// Returns gather_dim as a non-negative dimension of rows, never the one that is reduced.
int64_t row_dim(const Tensor& x, int64_t gather_dim) {
  TORCH_OVERLAP_CHECK(x.dim() >= 2, kValue, kAllGatherMatmul,
                      ": expected x of two or more dimensions, got shape ", x.sym_sizes(),
                      "; use x.unsqueeze(0)");
  const int64_t dim = wrap_dim(kAllGatherMatmul, x, gather_dim, "gather_dim");
  TORCH_OVERLAP_CHECK(dim + 1 < x.dim(), kValue, kAllGatherMatmul,
                      ": expected gather_dim to be a dimension of ", "rows, got ", gather_dim,
                      ", the features of shape ", x.sym_sizes(),
                      "; gather x first, with all_gather");
  return dim;
}

// Allocates products[i] = all_gather(x, gather_dim) weights[i]^T + biases[i], and the gathered x or
// an empty tensor.
Outputs allocate_all_gather_matmul(const Tensor& x, at::TensorList weights,
                                   const OptionalTensors& biases, int64_t group_size,
                                   int64_t gather_dim, bool return_gathered,
                                   std::string_view algorithm) {
  check_group_size(kAllGatherMatmul, group_size);
  check_algorithm(kAllGatherMatmul, algorithm);
  const int64_t dim = row_dim(x, gather_dim);
  check_weight_count(kAllGatherMatmul, weights.size(), biases.size());
  auto sizes = x.sym_sizes().vec();
  sizes[dim] *= group_size;
  Outputs out;
  out.gathered =
      return_gathered ? at::empty_symint(sizes, x.options()) : at::empty({0}, x.options());
  for (size_t i = 0; i < weights.size(); ++i) {
    check_weight(kAllGatherMatmul, x, weights[i], static_cast<int64_t>(i));
    sizes.back() = weights[i].sym_size(0);
    const auto bias = biases.empty() ? std::nullopt : biases.get(i);
    if (bias) check_bias(kAllGatherMatmul, x, *bias, weights[i], static_cast<int64_t>(i));
    out.products.push_back(at::empty_symint(sizes, x.options()));
  }
  return out;
}

std::tuple<std::vector<Tensor>, Tensor> all_gather_matmul_kernel(
    const Tensor& x, at::TensorList weights, const OptionalTensors& biases, std::string_view comm,
    int64_t group_size, int64_t gather_dim, bool return_gathered, std::string_view algorithm) {
  auto out = allocate_all_gather_matmul(x, weights, biases, group_size, gather_dim, return_gathered,
                                        algorithm);
  const auto communicator = find_comm(kAllGatherMatmul, comm, group_size);
  const int64_t dim = row_dim(x, gather_dim);
  const auto own = to_rows(x, dim);
  const int64_t rows = own.size(0);
  std::vector<Tensor> products;
  for (const auto& product : out.products) products.push_back(writable_rows(product, dim));
  const auto multiply = [&](const Tensor& input, int64_t begin) {
    for (size_t i = 0; i < weights.size(); ++i) {
      linear_out(kAllGatherMatmul, row_view(products[i], begin, input.size(0)), input, weights[i],
                 biases.empty() ? std::nullopt : biases.get(i),
                 /*overlaps_communication=*/input.size(0) < products[i].size(0));
    }
  };
  std::optional<Tensor> gathered;
  if (return_gathered) gathered = writable_rows(out.gathered, dim);
  int64_t features = 0;
  for (const auto& weight : weights) features += weight.size(0);
  const auto chosen = choose_algorithm({.op = kAllGatherMatmul,
                                        .dtype = x.scalar_type(),
                                        .m = rows * group_size,
                                        .n = features * group_size,
                                        .k = own.size(1),
                                        .chunk_rows = rows,
                                        .gather_bytes = gather_bytes(*communicator, own),
                                        .local_n = features,
                                        .local_k = own.size(1),
                                        .low_latency_bytes = 0},
                                       forward_algorithm(algorithm), communicator);
  if (chosen == Algorithm::p2p || chosen == Algorithm::fused || chosen == Algorithm::low_latency) {
    std::vector<Tensor> defined_biases(weights.size());
    for (size_t i = 0; i < biases.size(); ++i) {
      defined_biases[i] = std::optional<Tensor>(biases.get(i)).value_or(Tensor());
    }
    channel_gather_linear(kAllGatherMatmul, communicator,
                          {.own = own,
                           .scales = {},
                           .gathered = gathered.value_or(Tensor()),
                           .gathered_scales = {},
                           .method = gather_method(chosen)},
                          weights, defined_biases, products);
  } else if (chosen == Algorithm::pipelined) {
    GatherPipeline gather(*communicator, own, gathered);
    for (size_t step = 0; step < gather.steps(); ++step) {
      const auto input = gather.wait(step);
      const ProfilerRange span("chunk_gemm", step);
      multiply(input, gather.chunk(step) * rows);
    }
  } else {  // sequential; a measured bulk differs in the gradient only
    if (!gathered) gathered = at::empty({group_size * rows, own.size(1)}, x.options());
    communicator->all_gather_single(*gathered, own, /*async_op=*/false);
    multiply(*gathered, 0);
  }
  for (size_t i = 0; i < products.size(); ++i) copy_rows_back(products[i], out.products[i], dim);
  if (return_gathered) copy_rows_back(*gathered, out.gathered, dim);
  return {std::move(out.products), std::move(out.gathered)};
}

std::tuple<std::vector<Tensor>, Tensor> all_gather_matmul_meta(
    const Tensor& x, at::TensorList weights, const OptionalTensors& biases, std::string_view,
    int64_t group_size, int64_t gather_dim, bool return_gathered, std::string_view algorithm) {
  auto out = allocate_all_gather_matmul(x, weights, biases, group_size, gather_dim, return_gathered,
                                        algorithm);
  return {std::move(out.products), std::move(out.gathered)};
}

class AllGatherMatmul : public Function<AllGatherMatmul> {
 public:
  static constexpr bool is_traceable = true;

  // `biases`: those that exist, for the weights `biased`. Returns the products, then the gathered
  // x.
  static variable_list forward(AutogradContext* ctx, const Tensor& x, at::TensorList weights,
                               at::TensorList biases, const std::vector<int64_t>& biased,
                               std::string_view comm, int64_t group_size, int64_t gather_dim,
                               bool return_gathered, std::string_view algorithm) {
    const BelowAutograd guard;
    OptionalTensors optional_biases;
    if (!biased.empty()) optional_biases.resize(weights.size(), std::nullopt);
    for (size_t i = 0; i < biased.size(); ++i) optional_biases.set(biased[i], biases[i]);
    auto [outputs, gathered] = ops::all_gather_matmul(x, weights, optional_biases, comm, group_size,
                                                      gather_dim, return_gathered, algorithm);
    variable_list saved{x};
    saved.insert(saved.end(), weights.begin(), weights.end());
    if (return_gathered) saved.push_back(gathered);
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["weights"] = static_cast<int64_t>(weights.size());
    ctx->saved_data["biased"] = IValue(biased);
    ctx->saved_data["comm"] = std::string(comm);
    ctx->saved_data["group_size"] = group_size;
    ctx->saved_data["gather_dim"] = row_dim(x, gather_dim);
    ctx->saved_data["algorithm"] = std::string(algorithm);
    ctx->set_materialize_grads(false);
    outputs.push_back(std::move(gathered));
    return std::move(outputs);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto count = static_cast<size_t>(ctx->saved_data["weights"].toInt());
    const auto biased = ctx->saved_data["biased"].toIntVector();
    const auto& comm = ctx->saved_data["comm"].toStringRef();
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    const int64_t dim = ctx->saved_data["gather_dim"].toInt();
    const auto& algorithm = ctx->saved_data["algorithm"].toStringRef();
    const Tensor& x = saved[0];
    const bool kept = saved.size() > 1 + count;
    const Tensor gathered_grad = kept ? grads[count] : Tensor();

    variable_list result(1 + count + biased.size() + 6);
    const bool x_wanted = ctx->needs_input_grad(0);
    // Products that were used, and the weights of these whose gradient is needed.
    std::vector<Tensor> used_grads;
    std::vector<Tensor> used_weights;
    std::vector<int64_t> wanted;
    std::vector<size_t> wanted_at;
    for (size_t i = 0; i < count; ++i) {
      if (!grads[i].defined()) continue;
      if (ctx->needs_input_grad(1 + i)) {
        wanted.push_back(static_cast<int64_t>(used_grads.size()));
        wanted_at.push_back(1 + i);
      }
      used_grads.push_back(grads[i]);
      used_weights.push_back(saved[1 + i]);
    }
    for (size_t i = 0; i < biased.size(); ++i) {
      const auto& grad = grads[static_cast<size_t>(biased[i])];
      if (grad.defined() && ctx->needs_input_grad(1 + count + i)) {
        result[1 + count + i] = grad.flatten(0, -2).sum(0);
      }
    }
    const bool x_reached = x_wanted && (!used_grads.empty() || gathered_grad.defined());
    if (!x_reached && wanted.empty()) return result;

    if (at::GradMode::is_enabled()) {  // double backward may be requested
      // Ranks may differ in the number of features, and "fused" would then choose differently.
      const std::string scatter_by =
          algorithm == "auto" || algorithm == "fused" ? "sequential" : algorithm;
      if (x_reached) {
        Tensor sum;
        if (kept) {  // possibly used by only some ranks
          const Tensor term =
              gathered_grad.defined() ? gathered_grad : at::zeros_like(saved.back());
          sum = ops::reduce_scatter(term, dim, "sum", comm, group_size);
        }
        for (size_t i = 0; i < used_grads.size(); ++i) {
          const auto part =
              ops::matmul_reduce_scatter(used_grads[i], used_weights[i].t(), std::nullopt, comm,
                                         group_size, dim, "sum", scatter_by);
          sum = sum.defined() ? sum.add(part) : part;
        }
        result[0] = sum;
      }
      if (wanted.empty()) return result;
      const auto inputs = kept ? saved.back() : ops::all_gather(x, dim, comm, group_size);
      for (size_t i = 0; i < wanted.size(); ++i) {
        result[wanted_at[i]] =
            used_grads[static_cast<size_t>(wanted[i])].flatten(0, -2).t().mm(inputs.flatten(0, -2));
      }
      return result;
    }

    auto [x_grad, weight_grads] = ops::all_gather_matmul_backward(
        used_grads, x, used_weights, kept ? std::optional(saved.back()) : std::nullopt,
        gathered_grad.defined() ? std::optional(gathered_grad) : std::nullopt, x_reached, wanted,
        comm, group_size, dim, algorithm);
    if (x_reached) result[0] = std::move(x_grad);
    for (size_t i = 0; i < wanted.size(); ++i) result[wanted_at[i]] = std::move(weight_grads[i]);
    return result;
  }
};

std::tuple<std::vector<Tensor>, Tensor> all_gather_matmul_autograd(
    const Tensor& x, at::TensorList weights, const OptionalTensors& biases, std::string_view comm,
    int64_t group_size, int64_t gather_dim, bool return_gathered, std::string_view algorithm) {
  std::vector<Tensor> existing;
  std::vector<int64_t> biased;
  bool differentiable = needs_autograd(x);
  for (size_t i = 0; i < biases.size(); ++i) {
    const auto bias = biases.get(i);
    if (!bias || !bias->defined()) continue;
    differentiable |= needs_autograd(*bias);
    existing.push_back(*bias);
    biased.push_back(static_cast<int64_t>(i));
  }
  for (const auto& weight : weights) differentiable |= needs_autograd(weight);
  // An invalid number of weights or biases also takes the plain path, which reports it.
  if (!differentiable || weights.empty() || (!biases.empty() && biases.size() != weights.size())) {
    const BelowAutograd guard;
    return ops::all_gather_matmul(x, weights, biases, comm, group_size, gather_dim, return_gathered,
                                  algorithm);
  }
  auto outputs = AllGatherMatmul::apply(x, weights, at::TensorList(existing), biased, comm,
                                        group_size, gather_dim, return_gathered, algorithm);
  auto gathered = std::move(outputs.back());
  outputs.pop_back();
  return {std::move(outputs), std::move(gathered)};
}

}  // namespace

std::tuple<std::vector<Tensor>, Tensor> all_gather_matmul(const Tensor& x, at::TensorList weights,
                                                          const OptionalTensors& biases,
                                                          std::string_view comm, int64_t group_size,
                                                          int64_t gather_dim, bool return_gathered,
                                                          std::string_view algorithm) {
  static const auto handle = find_op<decltype(all_gather_matmul_kernel)>("all_gather_matmul");
  return handle.call(x, weights, biases, comm, group_size, gather_dim, return_gathered, algorithm);
}

}  // namespace torch_overlap::ops

TORCH_LIBRARY_FRAGMENT(torch_overlap, m) {
  m.def(
      "all_gather_matmul(Tensor x, Tensor[] weights, Tensor?[] biases, str comm, int group_size,"
      " int gather_dim=0, bool return_gathered=False, str algorithm=\"auto\")"
      " -> (Tensor[], Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("all_gather_matmul", torch_overlap::ops::all_gather_matmul_kernel);
}

TORCH_OVERLAP_KERNELS(Meta, m) {
  m.impl("all_gather_matmul", torch_overlap::ops::all_gather_matmul_meta);
}

TORCH_OVERLAP_KERNELS(Autograd, m) {
  m.impl("all_gather_matmul", torch_overlap::ops::all_gather_matmul_autograd);
}
