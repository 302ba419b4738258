#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/gemm/gemm.h"
#include "torch_overlap/gemm/sm90/kernels.h"
#include "torch_overlap/gemm/sm90/tile_costs.h"
#include "torch_overlap/overlap/schedule.h"

// Helpers shared by the launchers of fused kernels.
namespace torch_overlap::cuda {

using sm90::KernelInfo;
using sm90::KernelKey;
using sm90::TileCost;

// Number of rows of tiles that are computed before the next columns.
inline constexpr int kRowGroup = 16;

// Cost model on H200, for choosing a kernel: time in ns of a stage of a tile of 128 x 256; bytes of
// k per stage; outputs of that tile.
inline constexpr double kStageNs = 600;
inline constexpr double kStageBytes = 128;
inline constexpr double kOutputsPerTile = 128 * 256;

// Returns `matrix` if TMA can store to it. Otherwise returns a new tensor, which the caller copies
// to `matrix` afterwards.
at::Tensor mappable_out(const at::Tensor& matrix);

struct Operands {
  at::Tensor lhs;  // [m, k]
  at::Tensor rhs;  // [n, k] if K-major, otherwise [k, n]
  bool is_rhs_k_major;
  at::ScalarType out;
  // Scales of 8-bit operands: one per tensor, or one per row of lhs and per column of the product.
  at::Tensor lhs_scale;
  at::Tensor rhs_scale;
  bool scaled_by_row;
};

// Returns the operands of `args`, with `lhs` in place of its lhs. Operands that TMA cannot read in
// place are copied.
Operands operands_of(const GemmArgs& args, const at::Tensor& lhs, at::ScalarType out);

at::Tensor plain_lhs(const GemmOperand& lhs);

int sm_count(c10::Device device);

using Find = const KernelInfo* (*)(const KernelKey&);

// Returns a key without a tile.
KernelKey key_of(const Operands& operands);

const KernelInfo* kernel_of(Find find, KernelKey key, const TileCost& tile);

// Returns the kernel with the smallest `time(tile, kernel)`.
template <typename Time>
const KernelInfo& choose_kernel(Find find, const KernelKey& key, const Time& time) {
  const auto* const best = sm90::fastest_tile([&](const TileCost& tile) -> std::optional<double> {
    const KernelInfo* const kernel = kernel_of(find, key, tile);
    if (kernel == nullptr) return std::nullopt;
    return time(tile, *kernel);
  });
  TORCH_OVERLAP_CHECK(best != nullptr, kRuntime, "fused: expected a kernel, got none");
  return *kernel_of(find, key, *best);
}

// Returns the number of units. A unit is one tile, or one tile per block of a cluster.
int64_t num_units(const KernelInfo& kernel, int64_t rows, int64_t n);
int64_t num_units(const KernelInfo& kernel, const RowPartition& rows, int64_t n);

// Returns the parameters that all kernels share: everything except the maps of the outputs, and m.
sm90::GemmParams gemm_params(const GemmArgs& args, const Operands& operands,
                             const KernelInfo& kernel);

// Returns an empty map if there are no rows.
CUtensorMap rows_map(const at::Tensor& rows, int box);

}  // namespace torch_overlap::cuda
