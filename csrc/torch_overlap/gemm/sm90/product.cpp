#include "torch_overlap/gemm/sm90/product.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/gemm/sm90/maps.h"
#include "torch_overlap/gemm/sm90/tile_times.h"
#include "torch_overlap/gemm/sm90/types.h"

namespace torch_overlap::sm90 {
namespace {

constexpr int kHopper = 9;
// Rows of tiles that are computed before the next columns, of 128 rows.
constexpr int kRowGroup = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

const KernelInfo* kernel_of(const Product& product, const Choice& choice) {
  const auto find = product.residual != nullptr ? find_residual : find_kernel;
  return find({.lhs = operand_type(product.lhs_type),
               .rhs = operand_type(product.rhs_type),
               .out = vector_type(product.out_type),
               .rhs_along_k = product.rhs_along_k,
               .rows = choice.rows,
               .columns = choice.columns,
               .lhs_along_k = product.lhs_along_k});
}

int64_t tiles_of(const Product& product, const KernelInfo& kernel) {
  return ceil_div(product.m, int64_t{kernel.rows} * kernel.cluster) *
         ceil_div(product.n, kernel.columns);
}

// Clusters that run at the same time.
int64_t clusters_on(const KernelInfo& kernel) {
  return at::cuda::getCurrentDeviceProperties()->multiProcessorCount / kernel.cluster;
}

// Whether the current device has kernels for the matrices.
bool can_run(const Product& product) {
  return at::cuda::getCurrentDeviceProperties()->major == kHopper &&
         multiplies(product.lhs_type, product.rhs_type, product.out_type) &&
         is_mappable(product.lhs, product.lhs_type, product.lhs_stride) &&
         is_mappable(product.rhs, product.rhs_type, product.rhs_stride) &&
         is_storable(product.out, product.out_type, product.n, product.out_stride) &&
         is_mappable(product.residual, product.out_type, product.residual_stride);
}

// Gives it its shared memory on the current device, once.
void load(const KernelInfo& kernel) {
  static std::mutex mutex;
  static auto* const loaded = new std::set<std::pair<const void*, c10::DeviceIndex>>;
  const std::pair key(kernel.kernel, c10::cuda::current_device());
  const std::lock_guard lock(mutex);
  if (loaded->contains(key)) return;
  cuda::check(cudaFuncSetAttribute(kernel.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kernel.shared_bytes),
              "gemm: loading a kernel");
  loaded->insert(key);
}

}  // namespace

std::vector<Choice> choices(const Product& product) {
  std::vector<Choice> all;
  if (!can_run(product)) return all;
  for (const TimedTile& tile : kTiles) {
    const Choice choice{tile.rows, tile.columns};
    if (kernel_of(product, choice) != nullptr) all.push_back(choice);
  }
  return all;
}

std::optional<Choice> guess(const Product& product) {
  if (!can_run(product)) return std::nullopt;
  const TimedTile* const best = quickest_tile([&](const TimedTile& tile) -> std::optional<double> {
    const KernelInfo* const kernel = kernel_of(product, {tile.rows, tile.columns});
    if (kernel == nullptr) return std::nullopt;
    const int64_t waves = ceil_div(tiles_of(product, *kernel), clusters_on(*kernel));
    return static_cast<double>(waves) * tile.time();
  });
  if (best == nullptr) return std::nullopt;
  return Choice{best->rows, best->columns};
}

void run(const Product& product, const Choice& choice) {
  const KernelInfo* const kernel = kernel_of(product, choice);
  TORCH_OVERLAP_CHECK(kernel != nullptr, kRuntime,
                      "gemm: expected a kernel of this tile, got none");
  load(*kernel);
  GemmParams params{};
  params.lhs = product.lhs_along_k ? matrix_map(product.lhs, product.lhs_type, product.m, product.k,
                                                product.lhs_stride, kernel->rows)
                                   : matrix_map(product.lhs, product.lhs_type, product.k, product.m,
                                                product.lhs_stride, kernel->depth);
  params.rhs = product.rhs_along_k
                   ? matrix_map(product.rhs, product.rhs_type, product.n, product.k,
                                product.rhs_stride, kernel->columns / kernel->cluster)
                   : matrix_map(product.rhs, product.rhs_type, product.k, product.n,
                                product.rhs_stride, kernel->depth, kernel->rhs_box_bytes);
  params.out = matrix_map(product.out, product.out_type, product.m, product.n, product.out_stride,
                          kWarpRows);
  params.m = static_cast<int>(product.m);
  params.n = static_cast<int>(product.n);
  params.k = static_cast<int>(product.k);
  params.row_group = std::max(1, kRowGroup * 128 / kernel->rows / kernel->cluster);
  params.plain = product.bias == nullptr && !product.gelu;
  params.epilogue.lhs_scale = product.lhs_scale;
  params.epilogue.rhs_scale = product.rhs_scale;
  params.epilogue.scaled_by_row = product.scaled_by_row;
  params.epilogue.bias = product.bias;
  params.epilogue.bias_type = product.bias_type;
  params.epilogue.gelu = product.gelu;
  const int64_t tiles = tiles_of(product, *kernel);
  const int64_t clusters = clusters_on(*kernel);
  const int blocks = static_cast<int>(std::min(tiles, clusters) * kernel->cluster);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto launched = [&] {
    if (product.residual == nullptr) return launch_gemm(*kernel, params, blocks, stream);
    const auto residual = matrix_map(product.residual, product.out_type, product.m, product.n,
                                     product.residual_stride, kAddendRows);
    return launch_residual(*kernel, {params, residual}, blocks, stream);
  };
  cuda::check(launched(), "gemm: a kernel of our own");
}

}  // namespace torch_overlap::sm90
