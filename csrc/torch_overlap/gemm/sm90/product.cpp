#include "torch_overlap/gemm/sm90/product.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/strings.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/gemm/sm90/arrivals.h"
#include "torch_overlap/gemm/sm90/maps.h"
#include "torch_overlap/gemm/sm90/types.h"

namespace torch_overlap::sm90 {
namespace {

constexpr int kHopper = 9;
constexpr int64_t kAlignment = 16;
// Rows of tiles that are computed before the next columns, of 128 rows.
constexpr int kRowGroup = 16;
constexpr Choice kTiles[] = {{128, 256}, {128, 192}, {128, 128}, {64, 256}};
constexpr Choice kSharedTiles[] = {{128, 256, true}, {128, 128, true}};
bool is_aligned(const void* data, at::ScalarType type, int64_t stride) {
  const auto element = static_cast<int64_t>(c10::elementSize(type));
  return reinterpret_cast<uintptr_t>(data) % kAlignment == 0 && stride * element % kAlignment == 0;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

const KernelInfo* kernel_of(const Product& product, const Choice& choice) {
  const auto find = product.residual != nullptr ? find_residual
                    : choice.stream_k           ? find_stream_k
                                                : find_kernel;
  return find({.lhs = operand_type(product.lhs_type),
               .rhs = operand_type(product.rhs_type),
               .out = vector_type(product.out_type),
               .rhs_along_k = product.rhs_along_k,
               .rows = choice.rows,
               .columns = choice.columns});
}

int64_t tiles_of(const Product& product, const KernelInfo& kernel) {
  return ceil_div(product.m, int64_t{kernel.rows} * kernel.cluster) *
         ceil_div(product.n, kernel.columns);
}

// Clusters that run at the same time.
int64_t clusters_for(const Product& product, const KernelInfo& kernel) {
  int sms = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  if (product.sm_target > 0) sms = std::min(sms, product.sm_target);
  return std::max(1, sms / kernel.cluster);
}

// How tiles are shared: the last ones of the product, or groups of clusters have one each.
struct Sharing {
  int64_t clusters;
  int64_t tiles;
  int64_t row_clusters;
  int64_t row_stages;
};

// How many make a tile of so many stages quickest: one of them reads the sums of all others, each
// of which takes about as long as two stages.
int64_t most_parts(int64_t depth) {
  int64_t parts = 1;
  while (2 * (parts + 1) * (parts + 1) <= depth) ++parts;
  return parts;
}

// Where there are fewer tiles than clusters. Each tile has clusters to itself where less than a
// tenth of them would be left: then each of these has one part of one tile.
std::optional<Sharing> sharing_of_one_wave(int64_t tiles, int64_t depth, int64_t most) {
  const int64_t clusters = std::min(most, tiles * most_parts(depth));
  if (clusters <= tiles) return std::nullopt;
  const int64_t parts = clusters / tiles;
  if (parts * tiles * 10 > clusters * 9 && parts > 1) {
    return Sharing{
        .clusters = parts * tiles, .tiles = tiles, .row_clusters = parts, .row_stages = depth};
  }
  return Sharing{
      .clusters = clusters, .tiles = tiles, .row_clusters = clusters, .row_stages = tiles * depth};
}

// Nothing: every cluster has whole tiles, or it cannot be done.
std::optional<Sharing> sharing_of(const Product& product, const KernelInfo& kernel) {
  const int64_t tiles = tiles_of(product, kernel);
  const int64_t depth = ceil_div(product.k, kernel.depth);
  const int64_t clusters = clusters_for(product, kernel);
  std::optional<Sharing> sharing;
  if (tiles < clusters) {
    sharing = sharing_of_one_wave(tiles, depth, clusters);
  } else if (tiles % clusters != 0) {
    const int64_t last = tiles % clusters + clusters;  // two waves: each tile is cut once at most
    sharing = Sharing{
        .clusters = clusters, .tiles = last, .row_clusters = clusters, .row_stages = last * depth};
  }
  if (!sharing) return std::nullopt;
  const int64_t tile_bytes =
      int64_t{kernel.cluster} * kernel.rows * kernel.columns * static_cast<int64_t>(sizeof(float));
  const bool fits = 2 * (sharing->clusters - 1) * tile_bytes <= product.workspace_bytes &&
                    sharing->tiles * depth <= std::numeric_limits<int>::max();
  return fits ? sharing : std::nullopt;
}

GemmParams params_of(const Product& product, const KernelInfo& kernel) {
  GemmParams params{};
  params.lhs = matrix_map(product.lhs, product.lhs_type, product.m, product.k, product.lhs_stride,
                          kernel.rows);
  params.rhs = product.rhs_along_k ? matrix_map(product.rhs, product.rhs_type, product.n, product.k,
                                                product.rhs_stride, kernel.columns / kernel.cluster)
                                   : matrix_map(product.rhs, product.rhs_type, product.k, product.n,
                                                product.rhs_stride, 64);
  params.out = matrix_map(product.out, product.out_type, product.m, product.n, product.out_stride,
                          kWarpRows);
  params.m = static_cast<int>(product.m);
  params.n = static_cast<int>(product.n);
  params.k = static_cast<int>(product.k);
  params.row_group = std::max(1, kRowGroup * 128 / kernel.rows / kernel.cluster);
  params.plain = product.bias == nullptr && !product.gelu;
  params.epilogue.lhs_scale = product.lhs_scale;
  params.epilogue.rhs_scale = product.rhs_scale;
  params.epilogue.scaled_by_row = product.scaled_by_row;
  params.epilogue.bias = product.bias;
  params.epilogue.bias_type = product.bias_type;
  params.epilogue.gelu = product.gelu;
  return params;
}

StreamKParams whole_tiles_of(const Product& product, const KernelInfo& kernel) {
  const int64_t columns = ceil_div(product.n, kernel.columns);
  const int64_t tiles = tiles_of(product, kernel);
  return {.gemm = params_of(product, kernel),
          .rows = static_cast<int>(tiles / columns),
          .columns = static_cast<int>(columns),
          .depth = static_cast<int>(ceil_div(product.k, kernel.depth)),
          .whole_tiles = static_cast<int>(tiles),
          .row_stages = 0,
          .row_clusters = 1,
          .share = 0,
          .rest = 0,
          .sums = nullptr,
          .arrived = nullptr};
}

void share(StreamKParams& params, const Product& product, const Sharing& sharing) {
  params.whole_tiles -= static_cast<int>(sharing.tiles);
  params.row_stages = static_cast<int>(sharing.row_stages);
  params.row_clusters = static_cast<int>(sharing.row_clusters);
  params.share = static_cast<int>(sharing.row_stages / sharing.row_clusters);
  params.rest = static_cast<int>(sharing.row_stages % sharing.row_clusters);
  params.sums = static_cast<float*>(product.workspace);
  params.arrived = arrivals_for(c10::cuda::getCurrentCUDAStream());
}

}  // namespace

std::string to_string(const Choice& choice) {
  return concat(choice.rows, "x", choice.columns, choice.stream_k ? "-stream-k" : "");
}

std::vector<Choice> choices(const Product& product) {
  std::vector<Choice> all;
  if (at::cuda::getCurrentDeviceProperties()->major != kHopper) return all;
  if (!multiplies(product.lhs_type, product.rhs_type, product.out_type) ||
      !is_aligned(product.lhs, product.lhs_type, product.lhs_stride) ||
      !is_aligned(product.rhs, product.rhs_type, product.rhs_stride) ||
      !is_aligned(product.out, product.out_type, product.out_stride) ||
      !is_aligned(product.residual, product.out_type, product.residual_stride)) {
    return all;
  }
  for (const Choice& tile : kTiles) {
    if (kernel_of(product, tile) != nullptr) all.push_back(tile);
  }
  for (const Choice& tile : kSharedTiles) {
    const KernelInfo* const kernel = kernel_of(product, tile);
    if (kernel != nullptr && sharing_of(product, *kernel)) all.push_back(tile);
  }
  return all;
}

std::optional<Choice> guess(const Product& product) {
  std::optional<Choice> best;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const Choice& tile : choices(product)) {
    if (tile.stream_k) continue;
    const KernelInfo& kernel = *kernel_of(product, tile);
    const int64_t time = ceil_div(tiles_of(product, kernel), clusters_for(product, kernel)) *
                         kernel.rows * kernel.columns;
    if (time >= least) continue;
    least = time;
    best = tile;
  }
  return best;
}

void run(const Product& product, const Choice& choice) {
  const KernelInfo* const kernel = kernel_of(product, choice);
  TORCH_OVERLAP_CHECK(kernel != nullptr, kRuntime,
                      "gemm: expected a kernel of this tile, got none");
  cuda::check(cudaFuncSetAttribute(kernel->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kernel->shared_bytes),
              "gemm: loading a kernel");
  const auto sharing = choice.stream_k ? sharing_of(product, *kernel) : std::nullopt;
  TORCH_OVERLAP_CHECK(sharing.has_value() == choice.stream_k, kRuntime,
                      "gemm: expected tiles that can be shared along k, got others");
  const int64_t clusters =
      sharing ? sharing->clusters
              : std::min(tiles_of(product, *kernel), clusters_for(product, *kernel));
  const int blocks = static_cast<int>(clusters * kernel->cluster);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto launched = [&] {
    if (!sharing && product.residual == nullptr) {
      return launch_gemm(*kernel, params_of(product, *kernel), blocks, stream);
    }
    StreamKParams params = whole_tiles_of(product, *kernel);
    if (sharing) share(params, product, *sharing);
    if (product.residual == nullptr) return launch_stream_k(*kernel, params, blocks, stream);
    const auto residual = matrix_map(product.residual, product.out_type, product.m, product.n,
                                     product.residual_stride, kWarpRows);
    return launch_residual(*kernel, {params, residual}, blocks, stream);
  };
  cuda::check(launched(), "gemm: a kernel of our own");
}

}  // namespace torch_overlap::sm90
