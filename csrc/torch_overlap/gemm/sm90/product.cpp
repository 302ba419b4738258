#include "torch_overlap/gemm/sm90/product.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/gemm/sm90/maps.h"

namespace torch_overlap::sm90 {
namespace {

constexpr int kHopper = 9;
constexpr int64_t kAlignment = 16;
constexpr int64_t kElement = 2;
// Rows of tiles that are computed before the next columns, of 128 rows.
constexpr int kRowGroup = 16;
constexpr Choice kTiles[] = {{128, 256, false}, {128, 128, false}, {64, 256, false}};

bool is_aligned(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % kAlignment == 0 && stride * kElement % kAlignment == 0;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

const KernelInfo* kernel_of(const Product& product, const Choice& choice) {
  const bool is_half = product.dtype == at::kHalf;
  return find_kernel({.in = is_half ? OperandType::f16 : OperandType::bf16,
                      .out = is_half ? VectorType::f16 : VectorType::bf16,
                      .lhs_along_k = true,
                      .rhs_along_k = product.rhs_along_k,
                      .rows = choice.rows,
                      .columns = choice.columns});
}

int64_t tiles_of(const Product& product, const KernelInfo& kernel) {
  return ceil_div(product.m, int64_t{kernel.rows} * kernel.cluster) *
         ceil_div(product.n, kernel.columns);
}

// Clusters that run at the same time.
int64_t clusters_on(const KernelInfo& kernel) {
  return at::cuda::getCurrentDeviceProperties()->multiProcessorCount / kernel.cluster;
}

}  // namespace

std::vector<Choice> choices(const Product& product) {
  std::vector<Choice> all;
  if (at::cuda::getCurrentDeviceProperties()->major != kHopper) return all;
  if (!is_aligned(product.lhs, product.lhs_stride) ||
      !is_aligned(product.rhs, product.rhs_stride) ||
      !is_aligned(product.out, product.out_stride)) {
    return all;
  }
  for (const Choice& tile : kTiles) {
    const KernelInfo* const kernel = kernel_of(product, tile);
    if (kernel == nullptr) continue;
    all.push_back(tile);
    const int64_t tiles = tiles_of(product, *kernel);
    const int64_t clusters = clusters_on(*kernel);
    if (tiles % clusters != 0 && tiles < 4 * clusters) {
      all.push_back({tile.rows, tile.columns, true});
    }
  }
  return all;
}

void run(const Product& product, const Choice& choice, cudaStream_t stream) {
  const KernelInfo* const kernel = kernel_of(product, choice);
  TORCH_OVERLAP_CHECK(kernel != nullptr, kRuntime,
                      "gemm: expected a kernel of this tile, got none");
  cuda::check(cudaFuncSetAttribute(kernel->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kernel->shared_bytes),
              "gemm: loading a kernel");
  GemmParams params{};
  params.lhs = matrix_map(product.lhs, product.dtype, product.m, product.k, product.lhs_stride,
                          kernel->rows);
  params.rhs =
      product.rhs_along_k
          ? matrix_map(product.rhs, product.dtype, product.n, product.k, product.rhs_stride,
                       kernel->columns / kernel->cluster)
          : matrix_map(product.rhs, product.dtype, product.k, product.n, product.rhs_stride, 64);
  params.out = matrix_map(product.out, product.dtype, product.m, product.n, product.out_stride, 64);
  params.m = static_cast<int>(product.m);
  params.n = static_cast<int>(product.n);
  params.k = static_cast<int>(product.k);
  params.row_group = std::max(1, kRowGroup * 128 / kernel->rows / kernel->cluster);
  params.plain = product.bias == nullptr && !product.gelu;
  params.epilogue.bias = product.bias;
  params.epilogue.bias_type = product.bias_type;
  params.epilogue.gelu = product.gelu;
  const int64_t tiles = tiles_of(product, *kernel);
  const int64_t clusters = clusters_on(*kernel);
  at::Tensor parts;
  at::Tensor ready;
  if (choice.shares) {
    // The last whole wave, and what is left over.
    const int64_t waves = tiles / clusters;
    params.shared_tiles = static_cast<int>(tiles - std::max<int64_t>(0, waves - 1) * clusters);
    const int64_t blocks = clusters * kernel->cluster;
    const auto device = at::TensorOptions(at::kCUDA, c10::cuda::current_device());
    parts = at::empty({blocks * kernel->rows * kernel->columns}, device.dtype(at::kFloat));
    ready = at::zeros({blocks}, device.dtype(at::kInt));
    params.parts = parts.mutable_data_ptr<float>();
    params.part_ready = reinterpret_cast<uint32_t*>(ready.mutable_data_ptr<int32_t>());
  }
  const int64_t used = choice.shares ? clusters : std::min(tiles, clusters);
  cuda::check(launch_gemm(*kernel, params, static_cast<int>(used * kernel->cluster), stream),
              "gemm: a kernel of our own");
}

}  // namespace torch_overlap::sm90
