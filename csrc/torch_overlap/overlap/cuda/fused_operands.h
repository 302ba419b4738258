#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/gemm/sm90/kernels.h"
#include "torch_overlap/gemm/sm90/tile_times.h"
#include "torch_overlap/overlap/schedule.h"

// What those who launch fused kernels share.
namespace torch_overlap::cuda {

using sm90::KernelInfo;
using sm90::KernelKey;
using sm90::TimedTile;

// So many rows of tiles are computed before the next columns.
inline constexpr int kRowGroup = 16;

// What H200s take, for choosing: a stage, which is so many bytes of k, of a tile of 128 x 256.
inline constexpr double kStageNs = 600;
inline constexpr double kStageBytes = 128;
inline constexpr double kOutputsOfTile = 128 * 256;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where such a matrix may be written; copied to where it belongs afterwards.
at::Tensor mappable_out(const at::Tensor& matrix);

struct Operands {
  at::Tensor lhs;  // [m, k]
  at::Tensor rhs;  // [n, k] along k, else [k, n]
  bool rhs_along_k;
  at::ScalarType out;
  // Of 8 bits: one factor, or one for each row of lhs and column of the product.
  at::Tensor lhs_scale;
  at::Tensor rhs_scale;
  bool scaled_by_row;
};

// Those of `args` but for its lhs. What tensor copies cannot read where it lies is copied.
Operands operands_of(const GemmArgs& args, const at::Tensor& lhs, at::ScalarType out);

at::Tensor plain_lhs(const GemmOperand& lhs);

int sm_count(c10::Device device);

using Find = const KernelInfo* (*)(const KernelKey&);

// Without a tile.
KernelKey key_of(const Operands& operands);

const KernelInfo* kernel_of(Find find, KernelKey key, const TimedTile& tile);

// The one with the least `time(tile, kernel)`.
template <typename Time>
const KernelInfo& choose_kernel(Find find, const KernelKey& key, const Time& time) {
  const auto* const best = sm90::quickest_tile([&](const TimedTile& tile) -> std::optional<double> {
    const KernelInfo* const kernel = kernel_of(find, key, tile);
    if (kernel == nullptr) return std::nullopt;
    return time(tile, *kernel);
  });
  TORCH_OVERLAP_CHECK(best != nullptr, kRuntime, "fused: expected a kernel, got none");
  return *kernel_of(find, key, *best);
}

// Of all blocks of a cluster together.
int64_t units_of(const KernelInfo& kernel, int64_t rows, int64_t n);
int64_t units_of(const KernelInfo& kernel, const RowShare& rows, int64_t n);

// What all kernels have alike: but for the maps of the outputs, and m.
sm90::GemmParams gemm_params(const GemmArgs& args, const Operands& operands,
                             const KernelInfo& kernel);

// Of nothing, if there are no rows.
CUtensorMap rows_map(const at::Tensor& rows, int box);

}  // namespace torch_overlap::cuda
