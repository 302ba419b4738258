#include <cmath>

#include "torch_overlap/ops/cuda/cross_entropy.h"
#include "torch_overlap/overlap/cuda/values.cuh"

// A block computes a row. A thread reads vectors of kElements where all rows begin at multiples of
// their size, else single elements.
//
// The sum of exponentials is made in one pass (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018): it is scaled again whenever a larger element is met.
namespace torch_overlap::cuda {
namespace {

constexpr unsigned int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr float kLowest = -INFINITY;

// The quick function errs by far less than a rounding to 16 bits.
template <typename T>
__device__ __forceinline__ float exponential(float x) {
  return sizeof(T) == 4 ? expf(x) : __expf(x);
}

// The largest of some elements x, and the sum of exp(x - largest). An infinite largest element or a
// NaN makes the sum NaN, as it is by the formula.
template <typename T>
struct Terms {
  float largest = kLowest;
  float exponentials = 0;

  // Returns what is subtracted from elements: 0 if all are -inf, whose exponentials are 0.
  __device__ __forceinline__ static float base(float largest) {
    return largest == kLowest ? 0.0F : largest;
  }

  template <int n>
  __device__ __forceinline__ void add(const Pack<T, n>& pack) {
    float values[n];
    float found = largest;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      values[i] = widen(pack.values[i]);
      found = fmaxf(found, values[i]);
    }
    if (found > largest) {
      exponentials *= exponential<T>(largest - found);
      largest = found;
    }
#pragma unroll
    for (int i = 0; i < n; ++i) exponentials += exponential<T>(values[i] - base(largest));
  }

  __device__ __forceinline__ void merge(const Terms& other) {
    const float both = fmaxf(largest, other.largest);
    exponentials = exponentials * exponential<T>(largest - base(both)) +
                   other.exponentials * exponential<T>(other.largest - base(both));
    largest = both;
  }

  __device__ __forceinline__ void merge_warp() {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      Terms other;
      other.largest = __shfl_down_sync(~0U, largest, offset);
      other.exponentials = __shfl_down_sync(~0U, exponentials, offset);
      merge(other);
    }
  }
};

template <typename T>
__device__ __forceinline__ const T* row_of(const CrossEntropyRows& p, int64_t row) {
  return static_cast<const T*>(p.logits.data) + row * p.logits.stride;
}

template <typename T, int kElements>
__global__ void __launch_bounds__(kThreads)
    terms_kernel(const __grid_constant__ CrossEntropyRows p, bool with_sum, float* out) {
  const int64_t row = blockIdx.x;
  const auto* packs = reinterpret_cast<const Pack<T, kElements>*>(row_of<T>(p, row));
  const auto count = static_cast<unsigned int>(p.features / kElements);
  Terms<T> terms;
#pragma unroll 4
  for (unsigned int i = threadIdx.x; i < count; i += kThreads) terms.add(packs[i]);
  terms.merge_warp();
  __shared__ Terms<T> of_warps[kWarps];
  __shared__ float largest_of_row;
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = terms;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    terms = threadIdx.x < kWarps ? of_warps[threadIdx.x] : Terms<T>();
    terms.merge_warp();
  }
  if (threadIdx.x == 0) {
    const int64_t own = p.own[row];
    const bool is_held = own >= 0 && own < p.features;
    out[row] = terms.largest;
    out[p.rows + row] = terms.exponentials;
    out[2 * p.rows + row] = is_held ? widen(row_of<T>(p, row)[own]) : 0.0F;
    largest_of_row = terms.largest;
  }
  if (!with_sum) return;
  __syncthreads();
  // Differences are added: those of large logits are exact, and their own sum would overflow.
  const float largest = largest_of_row;
  float sum = 0;
  for (unsigned int i = threadIdx.x; i < count; i += kThreads) {
    const auto pack = packs[i];
#pragma unroll
    for (int j = 0; j < kElements; ++j) sum += widen(pack.values[j]) - largest;
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    sum += __shfl_down_sync(~0U, sum, offset);
  }
  __shared__ float sums[kWarps];
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kWarps; ++warp) sum += sums[warp];
  out[3 * p.rows + row] = largest == kLowest ? kLowest : sum;
}

template <typename T, int kElements>
__global__ void __launch_bounds__(kThreads)
    gradient_kernel(const __grid_constant__ CrossEntropyRows p,
                    const __grid_constant__ CrossEntropyGradient g) {
  using Elements = Pack<T, kElements>;
  const int64_t row = blockIdx.x;
  const auto* packs = reinterpret_cast<const Elements*>(row_of<T>(p, row));
  auto* const out = reinterpret_cast<Elements*>(static_cast<T*>(g.out) + row * p.features);
  const auto count = static_cast<unsigned int>(p.features / kElements);
  const float largest = g.largest[row];
  const float log_sum = g.log_sum[row];
  const float grad = g.grad[row];
  const int64_t own = p.own[row];
  const bool is_held = own >= 0 && own < p.features;
  const unsigned int at = is_held ? static_cast<unsigned int>(own) : ~0U;
#pragma unroll 4
  for (unsigned int i = threadIdx.x; i < count; i += kThreads) {
    const Elements x = packs[i];
    Elements result;
#pragma unroll
    for (int j = 0; j < kElements; ++j) {
      // The difference to the largest logit is exact; that to their sum would not be.
      const float softmax = exponential<T>(widen(x.values[j]) - largest - log_sum);
      const float target = i * kElements + j == at ? g.target : 0.0F;
      result.values[j] = narrow<T>((softmax - g.shift + target) * grad);
    }
    out[i] = result;
  }
}

template <typename T>
constexpr int kMost = kVectorBytes / sizeof(T);

template <typename T>
bool has_vectors(const CrossEntropyRows& p) {
  return p.features % kMost<T> == 0 && p.logits.is_aligned(sizeof(T));
}

template <typename T>
cudaError_t terms(const CrossEntropyRows& p, bool with_sum, float* out, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned int>(p.rows);
  if (has_vectors<T>(p)) {
    terms_kernel<T, kMost<T>><<<blocks, kThreads, 0, stream>>>(p, with_sum, out);
  } else {
    terms_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(p, with_sum, out);
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t gradient(const CrossEntropyRows& p, const CrossEntropyGradient& g,
                     cudaStream_t stream) {
  const auto blocks = static_cast<unsigned int>(p.rows);
  if (has_vectors<T>(p) && Rows{g.out, p.features}.is_aligned(sizeof(T))) {
    gradient_kernel<T, kMost<T>><<<blocks, kThreads, 0, stream>>>(p, g);
  } else {
    gradient_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(p, g);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_cross_entropy_terms(const CrossEntropyRows& p, bool with_sum, float* out,
                                       cudaStream_t stream) {
  if (p.type == RowType::kFloat) return terms<float>(p, with_sum, out, stream);
  if (p.type == RowType::kHalf) return terms<__half>(p, with_sum, out, stream);
  return terms<__nv_bfloat16>(p, with_sum, out, stream);
}

cudaError_t launch_cross_entropy_gradient(const CrossEntropyRows& p, const CrossEntropyGradient& g,
                                          cudaStream_t stream) {
  if (p.type == RowType::kFloat) return gradient<float>(p, g, stream);
  if (p.type == RowType::kHalf) return gradient<__half>(p, g, stream);
  return gradient<__nv_bfloat16>(p, g, stream);
}

}  // namespace torch_overlap::cuda
