#include <ATen/ops/empty.h>

#include "torch_overlap/ops/operator.h"
#include "torch_overlap/ops/overlapped.h"
#include "torch_overlap/ops/rows.h"
#include "torch_overlap/ops/scaled.h"

namespace torch_overlap::ops {
namespace {

struct ScaledMatmulAllReduce {
  using Result = Tensor;
  static constexpr const char* kName = "scaled_matmul_all_reduce";
  Tensor x;
  Tensor x_scale_inv;
  Tensor weight;
  Tensor weight_scale_inv;
  std::optional<Tensor> bias{};
  std::string_view comm;
  int64_t group_size = 1;
  std::string_view op = "sum";
  at::ScalarType out_dtype = at::kBFloat16;
  bool use_split_accumulator = false;
  std::string_view algorithm = "auto";
  int64_t scaling_mode = static_cast<int64_t>(ScalingMode::CURRENT_TENSOR_SCALING);
  TORCH_OVERLAP_FIELDS(x, x_scale_inv, weight, weight_scale_inv, bias, comm, group_size, op,
                       out_dtype, use_split_accumulator, algorithm, scaling_mode);
};

constexpr std::string_view kScaledAllReduce = ScaledMatmulAllReduce::kName;

Tensor scaled_matmul_all_reduce_kernel(const ScaledMatmulAllReduce& call) {
  const auto modes =
      check_scaled_x(kScaledAllReduce, call.x, call.x_scale_inv, call.group_size, /*dim=*/0, "rows",
                     call.out_dtype, call.algorithm, call.scaling_mode)
          .modes;
  check_choice(kScaledAllReduce, "op", "sum avg", call.op);
  check_scaled_weight(kScaledAllReduce, call.x, call.weight, call.weight_scale_inv, call.bias,
                      call.out_dtype, modes);
  auto sizes = call.x.sym_sizes().vec();
  sizes.back() = call.weight.sym_size(0);
  auto out = at::empty_symint(sizes, call.x.options().dtype(call.out_dtype));
  if (is_shape_only(call.x)) return out;
  const AllReduceProduct product{
      .op = kScaledAllReduce,
      .comm = find_comm(kScaledAllReduce, call.comm, call.group_size),
      .gemm = scaled_product(call.x, call.x_scale_inv, /*dim=*/0, call.weight,
                             call.weight_scale_inv, modes, call.use_split_accumulator),
      .bias = call.bias.value_or(Tensor()),
      .mean = call.op == "avg",
      .out = as_rows(out),
      .row_unit = row_unit(modes)};
  // Every algorithm checks its products before it sends.
  const auto algorithm =
      choose_algorithm(problem_of(product), call.algorithm, product.comm, [&] { check(product); });
  if (algorithm) run_all_reduce(product, *algorithm);
  return out;
}

TORCH_OVERLAP_OPERATOR(ScaledMatmulAllReduce, scaled_matmul_all_reduce_kernel)
TORCH_OVERLAP_NO_GRADIENT(ScaledMatmulAllReduce::kName)

}  // namespace
}  // namespace torch_overlap::ops
