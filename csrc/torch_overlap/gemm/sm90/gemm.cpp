#include "torch_overlap/gemm/sm90/gemm.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/rounding.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/gemm/sm90/small_m_kernels.h"
#include "torch_overlap/gemm/sm90/tensor_maps.h"
#include "torch_overlap/gemm/sm90/tile_costs.h"
#include "torch_overlap/gemm/sm90/types.h"

namespace torch_overlap::sm90 {
namespace {

constexpr int kHopper = 9;
// Height of a group of rows that is computed before the next columns, in tiles of 128 rows.
constexpr int kTilesPerRowGroup = 16;

const KernelInfo* find_kernel_for(const Problem& product, const TileShape& tile_shape) {
  const auto find = product.residual != nullptr ? find_residual_kernel : find_kernel;
  return find({.lhs = operand_type(product.lhs_type),
               .rhs = operand_type(product.rhs_type),
               .out = element_type(product.out_type),
               .is_rhs_k_major = product.is_rhs_k_major,
               .rows = tile_shape.rows,
               .columns = tile_shape.columns,
               .is_lhs_k_major = product.is_lhs_k_major});
}

int64_t tiles_of(const Problem& product, const KernelInfo& kernel) {
  return ceil_div(product.m, int64_t{kernel.rows} * kernel.cluster) *
         ceil_div(product.n, kernel.columns);
}

// Returns the maximum number of clusters that run at the same time.
int64_t max_active_clusters(const KernelInfo& kernel) {
  return at::cuda::getCurrentDeviceProperties()->multiProcessorCount / kernel.cluster;
}

// True if the current device has kernels for the matrices.
bool can_run(const Problem& product) {
  return at::cuda::getCurrentDeviceProperties()->major == kHopper &&
         supports_types(product.lhs_type, product.rhs_type, product.out_type) &&
         supports_tma_load(product.lhs, product.lhs_type, product.lhs_stride) &&
         supports_tma_load(product.rhs, product.rhs_type, product.rhs_stride) &&
         supports_tma_store(product.out, product.out_type, product.n, product.out_stride) &&
         supports_tma_load(product.residual, product.out_type, product.residual_stride);
}

// Raises the kernel's shared memory limit on the current device, once. This may wait for running
// kernels, which may wait for those of other devices: other threads are not held up.
void set_max_shared_memory(const KernelInfo& kernel) {
  static std::mutex mutex;
  static auto* const loaded = new std::set<std::pair<const void*, c10::DeviceIndex>>;
  const std::pair key(kernel.kernel, c10::cuda::current_device());
  {
    const std::lock_guard lock(mutex);
    if (loaded->contains(key)) return;
  }
  const cuda::RelaxedCapture relaxed;
  cuda::check(cudaFuncSetAttribute(kernel.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kernel.shared_bytes),
              "gemm: loading a kernel");
  const std::lock_guard lock(mutex);
  loaded->insert(key);
}

}  // namespace

std::vector<TileShape> supported_tile_shapes(const Problem& product) {
  std::vector<TileShape> all;
  if (!can_run(product)) return all;
  for (const TileCost& tile : kTileCosts) {
    const TileShape tile_shape{tile.rows, tile.columns};
    if (find_kernel_for(product, tile_shape) != nullptr) all.push_back(tile_shape);
  }
  return all;
}

std::optional<TileShape> heuristic_tile_shape(const Problem& product) {
  if (!can_run(product)) return std::nullopt;
  const TileCost* const best = fastest_tile([&](const TileCost& tile) -> std::optional<double> {
    const KernelInfo* const kernel = find_kernel_for(product, {tile.rows, tile.columns});
    if (kernel == nullptr) return std::nullopt;
    const int64_t waves = ceil_div(tiles_of(product, *kernel), max_active_clusters(*kernel));
    return static_cast<double>(waves) * tile.time();
  });
  if (best == nullptr) return std::nullopt;
  return TileShape{best->rows, best->columns};
}

void run(const Problem& product, const TileShape& tile_shape) {
  const KernelInfo* const kernel = find_kernel_for(product, tile_shape);
  TORCH_OVERLAP_CHECK(kernel != nullptr, kRuntime,
                      "gemm: expected a kernel of this tile, got none");
  set_max_shared_memory(*kernel);
  GemmParams params{};
  params.lhs = product.is_lhs_k_major
                   ? make_tensor_map(product.lhs, product.lhs_type, product.m, product.k,
                                     product.lhs_stride, kernel->rows)
                   : make_tensor_map(product.lhs, product.lhs_type, product.k, product.m,
                                     product.lhs_stride, kernel->depth);
  params.rhs = product.is_rhs_k_major
                   ? make_tensor_map(product.rhs, product.rhs_type, product.n, product.k,
                                     product.rhs_stride, kernel->columns / kernel->cluster)
                   : make_tensor_map(product.rhs, product.rhs_type, product.k, product.n,
                                     product.rhs_stride, kernel->depth, kernel->rhs_box_bytes);
  params.out = make_tensor_map(product.out, product.out_type, product.m, product.n,
                               product.out_stride, kWarpRows);
  params.m = static_cast<int>(product.m);
  params.n = static_cast<int>(product.n);
  params.k = static_cast<int>(product.k);
  params.row_group = std::max(1, kTilesPerRowGroup * 128 / kernel->rows / kernel->cluster);
  params.plain = product.bias == nullptr && !product.gelu;
  params.epilogue.lhs_scale = product.lhs_scale;
  params.epilogue.rhs_scale = product.rhs_scale;
  params.epilogue.scaled_by_row = product.scaled_by_row;
  params.epilogue.bias = product.bias;
  params.epilogue.bias_type = product.bias_type;
  params.epilogue.gelu = product.gelu;
  const int64_t tiles = tiles_of(product, *kernel);
  const int64_t clusters = max_active_clusters(*kernel);
  const int blocks = static_cast<int>(std::min(tiles, clusters) * kernel->cluster);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto launched = [&] {
    if (product.residual == nullptr) return launch_gemm(*kernel, params, blocks, stream);
    const auto residual = make_tensor_map(product.residual, product.out_type, product.m, product.n,
                                          product.residual_stride, kAddendRows);
    return launch_residual(*kernel, {params, residual}, blocks, stream);
  };
  cuda::check(launched(), "gemm: a kernel of our own");
}

namespace {

// Kernel of a product of few rows, and its grid. Null if there is none.
struct SmallMLaunch {
  const KernelInfo* kernel = nullptr;
  int block_features = 0;
  int blocks = 0;
};

// A pair of SMs is left free, as by ResidentGrid. Clusters share a tile along k if there are SMs
// for all of them; otherwise units of features are divided evenly among the blocks.
SmallMLaunch small_m_launch(const Problem& product, EarlyStart start) {
  const int64_t max_rows = is_8_bit(product.lhs_type) ? kMaxSmallMRows8Bit : kMaxSmallMRows;
  if (product.m > max_rows || product.lhs_type != product.rhs_type || !product.is_lhs_k_major ||
      !product.is_rhs_k_major || product.gelu || product.residual != nullptr ||
      product.bias != nullptr || !can_run(product)) {
    return {};
  }
  const int64_t sms = at::cuda::getCurrentDeviceProperties()->multiProcessorCount / 2 * 2 - 2;
  const int64_t depth = kSmallMDepthBytes / c10::elementSize(product.lhs_type);
  const int64_t stages = ceil_div(product.k, depth);
  const int64_t tiles = ceil_div(product.n, kSmallMFeatures);
  int split = 1;
  // At least split^2 stages: then no part of k is empty.
  for (const int more : {2, 4}) {
    if (more * tiles <= sms && more * more <= stages) split = more;
  }
  const int64_t features =
      split > 1 ? kSmallMFeatures : ceil_div(product.n, sms * kSmallMUnit) * kSmallMUnit;
  const int64_t blocks = split * ceil_div(product.n, features);
  return {find_small_m_kernel({.type = operand_type(product.lhs_type),
                               .rows = static_cast<int>(product.m),
                               .split_k = split,
                               .loads_weight_early = start == EarlyStart::loads_rhs}),
          static_cast<int>(features), static_cast<int>(blocks + blocks % 2)};
}

}  // namespace

bool supports_small_m(const Problem& product) {
  return small_m_launch(product, EarlyStart::none).kernel != nullptr;
}

bool load_small_m(const Problem& product, EarlyStart start) {
  const SmallMLaunch launch = small_m_launch(product, start);
  if (launch.kernel != nullptr) set_max_shared_memory(*launch.kernel);
  return launch.kernel != nullptr;
}

bool run_small_m(const Problem& product, EarlyStart start) {
  const SmallMLaunch launch = small_m_launch(product, start);
  if (launch.kernel == nullptr) return false;
  const KernelInfo& kernel = *launch.kernel;
  set_max_shared_memory(kernel);
  const auto weight_map = [&](int features) {
    return make_tensor_map(product.rhs, product.rhs_type, product.n, product.k, product.rhs_stride,
                           features, /*box_bytes=*/128, /*l2_bytes=*/128);
  };
  SmallMGemmParams params{};
  params.product.weight = weight_map(kernel.columns);
  const int narrow = launch.block_features % kernel.columns;
  params.weight_narrow = weight_map(narrow > 0 ? narrow : kernel.columns);
  params.product.rows = make_tensor_map(product.lhs, product.lhs_type, product.m, product.k,
                                        product.lhs_stride, kernel.rows);
  params.product.m = static_cast<int>(product.m);
  params.product.n = static_cast<int>(product.n);
  params.product.stages = static_cast<int>(ceil_div(product.k, kernel.depth));
  params.block_features = launch.block_features;
  params.rows_scale = product.lhs_scale;
  params.weight_scale = product.rhs_scale;
  params.scaled_by_row = product.scaled_by_row;
  params.out = product.out;
  params.out_stride = product.out_stride;
  params.out_is_f16 = product.out_type == at::kHalf;
  cuda::check(launch_small_m(kernel, params, launch.blocks, start != EarlyStart::none,
                             c10::cuda::getCurrentCUDAStream()),
              "gemm: a kernel of our own");
  return true;
}

}  // namespace torch_overlap::sm90
