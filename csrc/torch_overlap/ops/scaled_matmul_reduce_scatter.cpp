#include <ATen/ops/empty.h>

#include "torch_overlap/ops/operator.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/rows.h"
#include "torch_overlap/ops/scaled.h"

namespace torch_overlap::ops {
namespace {

struct ScaledMatmulReduceScatter {
  using Result = Tensor;
  static constexpr const char* kName = "scaled_matmul_reduce_scatter";
  Tensor x;
  Tensor x_scale_inv;
  Tensor weight;
  Tensor weight_scale_inv;
  std::optional<Tensor> bias{};
  std::string_view comm;
  int64_t group_size = 1;
  int64_t scatter_dim = 0;
  std::string_view op = "sum";
  at::ScalarType out_dtype = at::kBFloat16;
  bool use_split_accumulator = false;
  std::string_view algorithm = "auto";
  int64_t scaling_mode = static_cast<int64_t>(ScalingMode::CURRENT_TENSOR_SCALING);
  TORCH_OVERLAP_FIELDS(x, x_scale_inv, weight, weight_scale_inv, bias, comm, group_size,
                       scatter_dim, op, out_dtype, use_split_accumulator, algorithm, scaling_mode);
};

constexpr std::string_view kScaledReduceScatter = ScaledMatmulReduceScatter::kName;

Tensor scaled_matmul_reduce_scatter_kernel(const ScaledMatmulReduceScatter& call) {
  const auto [dim, modes] = check_scaled_x(kScaledReduceScatter, call.x, call.x_scale_inv,
                                           call.group_size, call.scatter_dim, "scatter_dim",
                                           call.out_dtype, call.algorithm, call.scaling_mode);
  check_choice(kScaledReduceScatter, "op", "sum avg", call.op);
  check_divisible(kScaledReduceScatter, call.x, dim, call.group_size);
  check_scaled_weight(kScaledReduceScatter, call.x, call.weight, call.weight_scale_inv, call.bias,
                      call.out_dtype, modes);
  auto sizes = call.x.sym_sizes().vec();
  sizes[dim] = sizes[dim] / call.group_size;
  sizes.back() = call.weight.sym_size(0);
  auto out = at::empty_symint(sizes, call.x.options().dtype(call.out_dtype));
  if (is_shape_only(call.x)) return out;
  const ReduceScatterProducts products{
      .op = kScaledReduceScatter,
      .comm = find_comm(kScaledReduceScatter, call.comm, call.group_size),
      .gemms = {scaled_product(call.x, call.x_scale_inv, dim, call.weight, call.weight_scale_inv,
                               modes, call.use_split_accumulator)},
      .bias = call.bias.value_or(Tensor()),
      .mean = call.op == "avg",
      .out = writable_rows(out, dim)};
  // Every algorithm checks its products before it sends. With block scales the rows of a chunk must
  // be valid for every algorithm, so the check runs before the choice.
  if (row_unit(modes) > 1) check(products);
  const auto algorithm = choose_algorithm(problem_of(products), call.algorithm, products.comm,
                                          [&] { check(products); });
  if (!algorithm) return out;
  run_reduce_scatter(products, *algorithm);
  copy_rows_back(products.out, out, dim);
  return out;
}

TORCH_OVERLAP_OPERATOR(ScaledMatmulReduceScatter, scaled_matmul_reduce_scatter_kernel)
TORCH_OVERLAP_NO_GRADIENT(ScaledMatmulReduceScatter::kName)

}  // namespace
}  // namespace torch_overlap::ops
