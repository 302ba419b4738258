#include <ATen/ops/empty.h>

#include "torch_overlap/ops/operator.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/rows.h"
#include "torch_overlap/ops/scaled.h"

namespace torch_overlap::ops {
namespace {

struct ScaledAllGatherMatmul {
  using Result = std::tuple<std::vector<Tensor>, Tensor, Tensor>;
  static constexpr const char* kName = "scaled_all_gather_matmul";
  Tensor x;
  Tensor x_scale_inv;
  std::vector<Tensor> weights;
  std::vector<Tensor> weights_scale_inv;
  OptionalTensors biases{};
  std::string_view comm;
  int64_t group_size = 1;
  int64_t gather_dim = 0;
  at::ScalarType out_dtype = at::kBFloat16;
  bool use_split_accumulator = false;
  std::string_view algorithm = "auto";
  int64_t scaling_mode = static_cast<int64_t>(ScalingMode::CURRENT_TENSOR_SCALING);
  bool return_gathered = false;
  TORCH_OVERLAP_FIELDS(x, x_scale_inv, weights, weights_scale_inv, biases, comm, group_size,
                       gather_dim, out_dtype, use_split_accumulator, algorithm, scaling_mode,
                       return_gathered);
};

constexpr std::string_view kScaledAllGather = ScaledAllGatherMatmul::kName;

// Allocates the products, and the gathered x and its scales or empty tensors.
ScaledAllGatherMatmul::Result allocate(const ScaledAllGatherMatmul& call,
                                       const ScaledInput& input) {
  const auto& [dim, modes] = input;
  const auto& [x, scales, weights] = std::tie(call.x, call.x_scale_inv, call.weights);
  check_weight_count(kScaledAllGather, weights.size(), call.biases.size());
  TORCH_OVERLAP_CHECK(call.weights_scale_inv.size() == weights.size(), kValue, kScaledAllGather,
                      ": expected one scale_inv for each of the ", weights.size(),
                      " weights in weights_scale_inv, got ", call.weights_scale_inv.size(),
                      ". Pass what quantize gave for each.");
  auto sizes = x.sym_sizes().vec();
  sizes[dim] *= call.group_size;
  ScaledAllGatherMatmul::Result out;
  auto& [products, gathered, gathered_scales] = out;
  gathered = empty_if(call.return_gathered, sizes, x.options());
  const bool has_scales = call.return_gathered && modes.gathers_scales();
  auto scale_sizes = scales.sym_sizes().vec();
  if (has_scales) scale_sizes.at(0) *= call.group_size;
  gathered_scales = empty_if(has_scales, scale_sizes, scales.options());
  for (size_t i = 0; i < weights.size(); ++i) {
    check_scaled_weight(kScaledAllGather, x, weights[i], call.weights_scale_inv[i],
                        optional_at(call.biases, i), call.out_dtype, modes,
                        static_cast<int64_t>(i));
    sizes.back() = weights[i].sym_size(0);
    products.push_back(at::empty_symint(sizes, x.options().dtype(call.out_dtype)));
  }
  return out;
}

ScaledAllGatherMatmul::Result scaled_all_gather_matmul_kernel(const ScaledAllGatherMatmul& call) {
  const auto input =
      check_scaled_x(kScaledAllGather, call.x, call.x_scale_inv, call.group_size, call.gather_dim,
                     "gather_dim", call.out_dtype, call.algorithm, call.scaling_mode);
  const auto& [dim, modes] = input;
  auto out = allocate(call, input);
  if (is_shape_only(call.x)) return out;
  auto& [results, gathered, gathered_scales] = out;
  GatherProducts products{.op = kScaledAllGather,
                          .comm = find_comm(kScaledAllGather, call.comm, call.group_size),
                          .own = to_rows(call.x, dim),
                          .scales = scale_rows(call.x, call.x_scale_inv, dim, modes)};
  Tensor scales_out;  // gathered scales in the shape of the gathered x
  if (call.return_gathered) {
    products.gathered = writable_rows(gathered, dim);
    if (products.scales.defined()) {
      auto sizes = gathered.sizes().vec();
      sizes.back() = products.scales.size(1);
      scales_out = gathered_scales.view(products.scales.scalar_type()).view(sizes);
      products.gathered_scales = writable_rows(scales_out, dim);
    }
  }
  for (size_t i = 0; i < call.weights.size(); ++i) {
    auto args = scaled_product(call.x_scale_inv, call.weights[i], call.weights_scale_inv[i], modes,
                               call.use_split_accumulator);
    args.out = writable_rows(results[i], dim);
    args.epilogue.bias = contiguous_or_undefined(optional_at(call.biases, i));
    products.gemms.push_back(std::move(args));
  }
  // Every algorithm checks its products before it sends, because 8-bit products restrict sizes.
  // With block scales the rows of a chunk must be valid for every algorithm, so the check runs
  // before the choice.
  if (row_unit(modes) > 1) check(products);
  const auto algorithm = choose_algorithm(problem_of(products), call.algorithm, products.comm,
                                          [&] { check(products); });
  if (!algorithm) return out;
  run_gather(products, *algorithm);
  for (size_t i = 0; i < results.size(); ++i) {
    copy_rows_back(products.gemms[i].out, results[i], dim);
  }
  if (call.return_gathered) copy_rows_back(products.gathered, gathered, dim);
  if (scales_out.defined()) copy_rows_back(products.gathered_scales, scales_out, dim);
  return out;
}

TORCH_OVERLAP_OPERATOR(ScaledAllGatherMatmul, scaled_all_gather_matmul_kernel)
TORCH_OVERLAP_NO_GRADIENT(ScaledAllGatherMatmul::kName)

}  // namespace
}  // namespace torch_overlap::ops
