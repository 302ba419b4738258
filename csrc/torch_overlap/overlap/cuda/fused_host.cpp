#include "torch_overlap/overlap/cuda/fused_host.h"

#include <ATen/cuda/CUDAContextLight.h>

#include <array>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/gemm/sm90/tensor_maps.h"
#include "torch_overlap/gemm/sm90/types.h"
#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/fused_operands.h"

namespace torch_overlap::cuda {
namespace {

using sm90::ElementType;

constexpr int kHopper = 9;

// Smallest tile of a reduce-scatter.
constexpr int kMinTileRows = 128;
constexpr int kMinTileColumns = 128;

// Loads the kernel of the key, if there is one.
void load(const KernelKey& key, Find find) {
  const KernelInfo* const kernel = find(key);
  if (kernel == nullptr) return;
  check(cudaFuncSetAttribute(kernel->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel->shared_bytes),
        "overlap: loading fused kernels");
}

}  // namespace

std::string fused_unsupported_reason(const FusedShape& shape) {
  const auto* properties = at::cuda::getDeviceProperties(shape.device.index());
  if (properties->major != kHopper) {
    return concat("fused kernels are for sm_90, this is sm_", properties->major, properties->minor);
  }
  if (shape.rows.size > kMaxFusedRanks) {
    return concat("fused kernels are for at most ", kMaxFusedRanks, " ranks, there are ",
                  shape.rows.size);
  }
  const FusedTypes& types = shape.types;
  if (!sm90::supports_types(types.lhs, types.rhs, types.out)) {
    return concat("fused kernels multiply bfloat16 or float16, and 8-bit floats into one of them, ",
                  "not ", types.lhs, " with ", types.rhs, " into ", types.out);
  }
  if (types.scaling != ScalingMode::NO_SCALING && !supports_fast_accumulation(types.scaling)) {
    return concat("fused kernels take one factor for each 8-bit operand or row, not ",
                  to_string(types.scaling));
  }
  if (types.use_split_accumulator) {
    return "fused kernels do not promote the sums of 8-bit operands on the way; pass "
           "use_split_accumulator=False";
  }
  if (shape.k == 0 || shape.n == 0 || shape.rows.rows == 0) return "there is nothing to compute";
  // TMA alignment of the rows of the operands and of the outputs, which may be stored to other
  // ranks.
  const auto per_row = [](at::ScalarType type) {
    return sm90::kTmaAlignmentBytes / static_cast<int64_t>(c10::elementSize(type));
  };
  if (shape.k % per_row(types.lhs) != 0 || shape.n % per_row(types.out) != 0) {
    return concat("fused kernels take k that is a multiple of ", per_row(types.lhs), " and n of ",
                  per_row(types.out), ", not ", shape.k, " and ", shape.n);
  }
  const int64_t tiles =
      ceil_div(shape.rows.largest(), kMinTileRows) * ceil_div(shape.n, kMinTileColumns);
  if (tiles > kMaxTileFlags) {
    return concat("a chunk would have ", tiles, " tiles; there are words for ", kMaxTileFlags);
  }
  return {};
}

void load_fused_kernels() {
  if (at::cuda::getCurrentDeviceProperties()->major != kHopper) return;
  using enum sm90::OperandType;
  constexpr std::array kOperands{std::pair(bf16, bf16), std::pair(f16, f16), std::pair(e4m3, e4m3),
                                 std::pair(e4m3, e5m2), std::pair(e5m2, e4m3)};
  for (const Find find : {Find{find_fused_gather}, Find{find_fused_reduce_scatter},
                          Find{find_fused_reduce_scatter_sum}}) {
    for (const auto& [lhs, rhs] : kOperands) {
      for (const auto out : {ElementType::bf16, ElementType::f16}) {
        for (const bool is_k_major : {true, false}) {
          for (const TileCost& tile : sm90::kTileCosts) {
            load({.lhs = lhs,
                  .rhs = rhs,
                  .out = out,
                  .is_rhs_k_major = is_k_major,
                  .rows = tile.rows,
                  .columns = tile.columns},
                 find);
          }
        }
      }
    }
  }
  load_fused_all_reduce_kernels();
}

}  // namespace torch_overlap::cuda
