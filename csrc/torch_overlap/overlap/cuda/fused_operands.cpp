#include "torch_overlap/overlap/cuda/fused_operands.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>

#include <limits>

#include "torch_overlap/gemm/sm90/tensor_maps.h"
#include "torch_overlap/gemm/sm90/types.h"

namespace torch_overlap::cuda {
namespace {

// Returns `matrix` if TMA can load it in place, otherwise a copy.
at::Tensor mappable(const at::Tensor& matrix) {
  return sm90::supports_tma_load(matrix) ? matrix : matrix.clone(at::MemoryFormat::Contiguous);
}

at::Tensor contiguous(const at::Tensor& scales) {
  return scales.defined() ? scales.contiguous() : scales;
}

}  // namespace

at::Tensor mappable_out(const at::Tensor& matrix) {
  return sm90::supports_tma_store(matrix) ? matrix : at::empty(matrix.sizes(), matrix.options());
}

Operands operands_of(const GemmArgs& args, const at::Tensor& lhs, at::ScalarType out) {
  return {.lhs = mappable(lhs),
          .rhs = mappable(args.rhs.data),
          .is_rhs_k_major = args.rhs.transposed,
          .out = out,
          .lhs_scale = contiguous(args.lhs.scale_inv),
          .rhs_scale = contiguous(args.rhs.scale_inv),
          .scaled_by_row = args.rhs.scaling == ScalingMode::ROW_SCALING};
}

at::Tensor plain_lhs(const GemmOperand& lhs) {
  return lhs.transposed ? lhs.data.t().contiguous() : lhs.data;
}

int sm_count(c10::Device device) {
  return at::cuda::getDeviceProperties(device.index())->multiProcessorCount;
}

KernelKey key_of(const Operands& operands) {
  return {.lhs = sm90::operand_type(operands.lhs.scalar_type()),
          .rhs = sm90::operand_type(operands.rhs.scalar_type()),
          .out = sm90::element_type(operands.out),
          .is_rhs_k_major = operands.is_rhs_k_major,
          .rows = 0,
          .columns = 0};
}

const KernelInfo* kernel_of(Find find, KernelKey key, const TileCost& tile) {
  key.rows = tile.rows;
  key.columns = tile.columns;
  return find(key);
}

int64_t num_units(const KernelInfo& kernel, int64_t rows, int64_t n) {
  return ceil_div(rows, int64_t{kernel.rows} * kernel.cluster) * ceil_div(n, kernel.columns);
}

int64_t num_units(const KernelInfo& kernel, const RowPartition& rows, int64_t n) {
  int64_t count = 0;
  for (int chunk = 0; chunk < rows.size; ++chunk) {
    count += num_units(kernel, rows.length(chunk), n);
  }
  return count;
}

sm90::GemmParams gemm_params(const GemmArgs& args, const Operands& operands,
                             const KernelInfo& kernel) {
  sm90::GemmParams params{};
  params.lhs = sm90::make_tensor_map(operands.lhs, kernel.rows);
  params.rhs = operands.is_rhs_k_major
                   ? sm90::make_tensor_map(operands.rhs, kernel.columns / kernel.cluster)
                   : sm90::make_tensor_map(operands.rhs, kernel.depth, kernel.rhs_box_bytes);
  params.m = std::numeric_limits<int>::max();
  params.k = static_cast<int>(operands.lhs.size(1));
  params.n = static_cast<int>(operands.rhs.size(operands.is_rhs_k_major ? 0 : 1));
  if (sm90::is_8_bit(operands.lhs.scalar_type())) {
    params.epilogue.lhs_scale = operands.lhs_scale.const_data_ptr<float>();
    params.epilogue.rhs_scale = operands.rhs_scale.const_data_ptr<float>();
    params.epilogue.scaled_by_row = operands.scaled_by_row;
  }
  const auto& bias = args.epilogue.bias;
  params.plain = !bias.defined();
  params.epilogue.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  params.epilogue.bias_type =
      bias.defined() ? sm90::element_type(bias.scalar_type()) : sm90::ElementType::none;
  return params;
}

CUtensorMap rows_map(const at::Tensor& rows, int box) {
  if (rows.size(0) == 0) return {};
  return sm90::make_tensor_map(rows, box);
}

}  // namespace torch_overlap::cuda
