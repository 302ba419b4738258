#include "torch_overlap/overlap/cuda/fused_host.h"

#include <ATen/cuda/CUDAContextLight.h>

#include <array>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/gemm/sm90/maps.h"
#include "torch_overlap/gemm/sm90/types.h"
#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/fused_operands.h"

namespace torch_overlap::cuda {
namespace {

using sm90::VectorType;

constexpr int kHopper = 9;

// The smallest tile of a reduce-scatter.
constexpr int kLeastRows = 128;
constexpr int kLeastColumns = 128;

// If there is such a kernel.
void load(const KernelKey& key, Find find) {
  const KernelInfo* const kernel = find(key);
  if (kernel == nullptr) return;
  check(cudaFuncSetAttribute(kernel->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kernel->shared_bytes),
        "overlap: loading fused kernels");
}

}  // namespace

std::string fused_obstacle(const FusedShape& shape) {
  const auto* properties = at::cuda::getDeviceProperties(shape.device.index());
  if (properties->major != kHopper) {
    return concat("fused kernels are for sm_90, this is sm_", properties->major, properties->minor);
  }
  if (shape.rows.size > kMostFusedRanks) {
    return concat("fused kernels are for at most ", kMostFusedRanks, " ranks, there are ",
                  shape.rows.size);
  }
  const FusedTypes& types = shape.types;
  if (!sm90::multiplies(types.lhs, types.rhs, types.out)) {
    return concat("fused kernels multiply bfloat16 or float16, and 8-bit floats into one of them, ",
                  "not ", types.lhs, " with ", types.rhs, " into ", types.out);
  }
  if (types.scaling != ScalingMode::NO_SCALING && !has_fast_sums(types.scaling)) {
    return concat("fused kernels take one factor for each 8-bit operand or row, not ",
                  to_string(types.scaling));
  }
  if (types.use_split_accumulator) {
    return "fused kernels do not promote the sums of 8-bit operands on the way; pass "
           "use_split_accumulator=False";
  }
  if (shape.k == 0 || shape.n == 0 || shape.rows.rows == 0) return "there is nothing to compute";
  // Rows of copies of the operands, and of what is stored, also to other ranks.
  const auto per_row = [](at::ScalarType type) {
    return sm90::kCopyAlignment / static_cast<int64_t>(c10::elementSize(type));
  };
  if (shape.k % per_row(types.lhs) != 0 || shape.n % per_row(types.out) != 0) {
    return concat("fused kernels take k that is a multiple of ", per_row(types.lhs), " and n of ",
                  per_row(types.out), ", not ", shape.k, " and ", shape.n);
  }
  const int64_t tiles =
      ceil_div(shape.rows.largest(), kLeastRows) * ceil_div(shape.n, kLeastColumns);
  if (tiles > kMostTiles) {
    return concat("a chunk would have ", tiles, " tiles; there are words for ", kMostTiles);
  }
  return {};
}

void load_fused_kernels() {
  if (at::cuda::getCurrentDeviceProperties()->major != kHopper) return;
  using enum sm90::OperandType;
  constexpr std::array kOperands{std::pair(bf16, bf16), std::pair(f16, f16), std::pair(e4m3, e4m3),
                                 std::pair(e4m3, e5m2), std::pair(e5m2, e4m3)};
  for (const Find find :
       {Find{find_fused_gather}, Find{find_fused_scatter}, Find{find_fused_sum}}) {
    for (const auto& [lhs, rhs] : kOperands) {
      for (const auto out : {VectorType::bf16, VectorType::f16}) {
        for (const bool along_k : {true, false}) {
          for (const TimedTile& tile : sm90::kTiles) {
            load({.lhs = lhs,
                  .rhs = rhs,
                  .out = out,
                  .rhs_along_k = along_k,
                  .rows = tile.rows,
                  .columns = tile.columns},
                 find);
          }
        }
      }
    }
  }
  load_fused_reduce_kernels();
}

}  // namespace torch_overlap::cuda
