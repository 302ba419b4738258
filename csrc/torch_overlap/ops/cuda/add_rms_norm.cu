#include "torch_overlap/ops/cuda/add_rms_norm.h"
#include "torch_overlap/overlap/cuda/values.cuh"

// A block computes a row at a time, whose elements its threads hold in registers: kPacks vectors
// each, which are kThreads vectors apart.
namespace torch_overlap::cuda {
namespace {

constexpr int kWarp = 32;

template <typename T>
constexpr int kElements = kVectorBytes / sizeof(T);

template <typename T>
using Vector = Pack<T, kElements<T>>;

// Returns the sum over the block, on all threads.
template <int kThreads>
__device__ __forceinline__ float sum_of_block(float value) {
  __shared__ float of_warps[kThreads / kWarp];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(~0U, value, offset);
  }
  __syncthreads();  // the row before has been read
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) sum += of_warps[warp];
  return sum;
}

template <typename T>
__device__ __forceinline__ const Vector<T>* row_of(const Rows& rows, int64_t row) {
  const T* const begin = static_cast<const T*>(rows.data) + row * rows.stride;
  return reinterpret_cast<const Vector<T>*>(begin);
}

template <typename T, int kThreads, int kPacks>
__global__ void __launch_bounds__(kThreads)
    add_rms_norm_kernel(const __grid_constant__ AddRmsNormParams p) {
  constexpr int n = kElements<T>;
  const int64_t row = blockIdx.x;
  const auto count = static_cast<unsigned int>(p.features / n);
  const bool adds = p.residual.data != nullptr;
  const auto* const x = row_of<T>(p.x, row);
  const auto* const residual = row_of<T>(p.residual, row);
  auto* const hidden = reinterpret_cast<Vector<T>*>(static_cast<T*>(p.hidden) + row * p.features);
  Vector<T> h[kPacks];
  float squares = 0;
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    const unsigned int at = pack * kThreads + threadIdx.x;
    if (at >= count) continue;
    h[pack] = x[at];
    if (adds) {
      const auto other = residual[at];
#pragma unroll
      for (int i = 0; i < n; ++i) {
        h[pack].values[i] = narrow<T>(widen(h[pack].values[i]) + widen(other.values[i]));
      }
      hidden[at] = h[pack];
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float value = widen(h[pack].values[i]);
      squares = fmaf(value, value, squares);
    }
  }
  const float mean = sum_of_block<kThreads>(squares) / static_cast<float>(p.features);
  const float inverse = rsqrtf(mean + p.eps);
  if (threadIdx.x == 0) p.inverse[row] = inverse;
  const auto* const weight = static_cast<const Vector<T>*>(p.weight);
  auto* const norm = reinterpret_cast<Vector<T>*>(static_cast<T*>(p.norm) + row * p.features);
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    const unsigned int at = pack * kThreads + threadIdx.x;
    if (at >= count) continue;
    const auto factor = weight[at];
    Vector<T> out;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      out.values[i] = narrow<T>(widen(h[pack].values[i]) * inverse * widen(factor.values[i]));
    }
    norm[at] = out;
  }
}

// With h' = h / rms(h) and g = grad * weight, the gradient of h is (g - h' mean(g h')) / rms(h). A
// block adds grad * h' of its rows in registers.
template <typename T, int kThreads, int kPacks>
__global__ void __launch_bounds__(kThreads)
    gradient_rows_kernel(const __grid_constant__ AddRmsNormGradient p) {
  constexpr int n = kElements<T>;
  const auto count = static_cast<unsigned int>(p.features / n);
  const bool adds = p.hidden_grad.data != nullptr;
  const auto* const weights = static_cast<const Vector<T>*>(p.weight);
  Vector<T> weight[kPacks];
  float weight_grad[kPacks][n] = {};
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    const unsigned int at = pack * kThreads + threadIdx.x;
    if (at < count) weight[pack] = weights[at];
  }
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const auto* const grads = row_of<T>(p.grad, row);
    const auto* const hidden = row_of<T>(p.hidden, row);
    const auto* const hidden_grads = row_of<T>(p.hidden_grad, row);
    const float inverse = p.inverse[row];
    Vector<T> grad[kPacks];
    Vector<T> h[kPacks];
    Vector<T> hidden_grad[kPacks];
    float product = 0;
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      const unsigned int at = pack * kThreads + threadIdx.x;
      if (at >= count) continue;
      grad[pack] = grads[at];
      h[pack] = hidden[at];
      if (adds) hidden_grad[pack] = hidden_grads[at];
    }
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      if (pack * kThreads + threadIdx.x >= count) continue;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float dy = widen(grad[pack].values[i]);
        const float normal = widen(h[pack].values[i]) * inverse;
        product = fmaf(dy * widen(weight[pack].values[i]), normal, product);
        weight_grad[pack][i] = fmaf(dy, normal, weight_grad[pack][i]);
      }
    }
    const float mean = sum_of_block<kThreads>(product) / static_cast<float>(p.features);
    auto* const sum = reinterpret_cast<Vector<T>*>(static_cast<T*>(p.sum) + row * p.features);
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      const unsigned int at = pack * kThreads + threadIdx.x;
      if (at >= count) continue;
      Vector<T> out;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float g = widen(grad[pack].values[i]) * widen(weight[pack].values[i]);
        const float normal = widen(h[pack].values[i]) * inverse;
        const float other = adds ? widen(hidden_grad[pack].values[i]) : 0.0F;
        out.values[i] = narrow<T>(fmaf(g - normal * mean, inverse, other));
      }
      sum[at] = out;
    }
  }
  float* const partial = p.partial + int64_t{blockIdx.x} * p.features;
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    const unsigned int at = pack * kThreads + threadIdx.x;
    if (at >= count) continue;
#pragma unroll
    for (int i = 0; i < n; ++i) partial[at * n + i] = weight_grad[pack][i];
  }
}

constexpr unsigned int kColumns = 32;
constexpr unsigned int kRowsAtOnce = 16;

// Adds the blocks' parts, always in the same order.
template <typename T>
__global__ void __launch_bounds__(kColumns* kRowsAtOnce)
    gradient_sum_kernel(const float* partial, unsigned int blocks, int64_t features, T* out) {
  __shared__ float sums[kRowsAtOnce][kColumns];
  const int64_t column = int64_t{blockIdx.x} * kColumns + threadIdx.x;
  float sum = 0;
  if (column < features) {
#pragma unroll 4
    for (unsigned int block = threadIdx.y; block < blocks; block += kRowsAtOnce) {
      sum += partial[block * features + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= features) return;
#pragma unroll
  for (unsigned int row = 1; row < kRowsAtOnce; ++row) sum += sums[row][threadIdx.x];
  out[column] = narrow<T>(sum);
}

// Calls `launch` with the fewest threads and vectors of each that hold a row.
template <typename T, typename Launch>
cudaError_t for_width(int64_t features, const Launch& launch) {
  const int64_t vectors = features / kElements<T>;
  if (vectors <= 128) return launch.template operator()<128, 1>();
  if (vectors <= 256) return launch.template operator()<256, 1>();
  if (vectors <= 512) return launch.template operator()<256, 2>();
  if (vectors <= 1024) return launch.template operator()<256, 4>();
  if (vectors <= 2048) return launch.template operator()<512, 4>();
  return launch.template operator()<1024, 4>();
}

template <typename T>
cudaError_t norm_of(const AddRmsNormParams& p, cudaStream_t stream) {
  return for_width<T>(p.features, [&]<int kThreads, int kPacks>() {
    add_rms_norm_kernel<T, kThreads, kPacks>
        <<<static_cast<unsigned int>(p.rows), kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

template <typename T>
cudaError_t gradient_of(const AddRmsNormGradient& p, cudaStream_t stream) {
  const auto status = for_width<T>(p.features, [&]<int kThreads, int kPacks>() {
    gradient_rows_kernel<T, kThreads, kPacks><<<p.blocks, kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
  if (status != cudaSuccess) return status;
  const auto columns = static_cast<unsigned int>((p.features + kColumns - 1) / kColumns);
  gradient_sum_kernel<T><<<columns, dim3(kColumns, kRowsAtOnce), 0, stream>>>(
      p.partial, p.blocks, p.features, static_cast<T*>(p.weight_grad));
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_add_rms_norm(const AddRmsNormParams& p, cudaStream_t stream) {
  if (p.type == RowType::kFloat) return norm_of<float>(p, stream);
  if (p.type == RowType::kHalf) return norm_of<__half>(p, stream);
  return norm_of<__nv_bfloat16>(p, stream);
}

cudaError_t launch_add_rms_norm_gradient(const AddRmsNormGradient& p, cudaStream_t stream) {
  if (p.type == RowType::kFloat) return gradient_of<float>(p, stream);
  if (p.type == RowType::kHalf) return gradient_of<__half>(p, stream);
  return gradient_of<__nv_bfloat16>(p, stream);
}

}  // namespace torch_overlap::cuda
