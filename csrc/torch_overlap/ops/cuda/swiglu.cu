#include <algorithm>

#include "torch_overlap/common/cuda/dependent_launch_device.h"
#include "torch_overlap/ops/cuda/swiglu.h"
#include "torch_overlap/overlap/cuda/values.cuh"

// Each thread computes one vector of a row: kVector elements where all rows begin at multiples of
// its size, else one element.
namespace torch_overlap::cuda {
namespace {

constexpr unsigned int kThreads = 256;
constexpr int64_t kMaxVectors = int64_t{1} << 30;  // of a launch: positions have 32 bits

// 1 / (1 + exp(-x)). The quick functions err by far less than a rounding to 16 bits.
template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 4) {
    return 1.0F / (1.0F + expf(-x));
  } else {
    return __fdividef(1.0F, 1.0F + __expf(-x));
  }
}

template <typename T, int kElements>
__device__ __forceinline__ Pack<T, kElements> load(const Rows& rows, int64_t row,
                                                   unsigned int vector) {
  const T* const begin = static_cast<const T*>(rows.data) + row * rows.stride;
  return reinterpret_cast<const Pack<T, kElements>*>(begin)[vector];
}

template <typename T, int kElements, bool kBackward>
__global__ void __launch_bounds__(kThreads)
    swiglu_kernel(const __grid_constant__ SwigluParams p, unsigned int vectors_per_row,
                  unsigned int count) {
  using Elements = Pack<T, kElements>;
  if constexpr (!kBackward) let_next_kernel_launch();  // the product may start
  const unsigned int position = blockIdx.x * kThreads + threadIdx.x;
  if (position >= count) return;
  const unsigned int row = position / vectors_per_row;
  const unsigned int vector = position - row * vectors_per_row;
  const auto gate = load<T, kElements>(p.gate, row, vector);
  const auto up = load<T, kElements>(p.up, row, vector);
  auto* const out = static_cast<Elements*>(p.out) +
                    static_cast<int64_t>(row) * vectors_per_row * (kBackward ? 2 : 1) + vector;
  Elements first;
  if constexpr (kBackward) {
    const auto grad = load<T, kElements>(p.grad, row, vector);
    Elements second;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float x = widen(gate.values[i]);
      const float dy = widen(grad.values[i]);
      const float s = sigmoid<T>(x);
      const float silu = x * s;
      first.values[i] = narrow<T>(dy * widen(up.values[i]) * fmaf(silu, 1.0F - s, s));
      second.values[i] = narrow<T>(dy * silu);
    }
    out[vectors_per_row] = second;
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float x = widen(gate.values[i]);
      first.values[i] = narrow<T>(x * sigmoid<T>(x) * widen(up.values[i]));
    }
  }
  *out = first;
}

void advance(Rows& matrix, int64_t rows, int64_t element_bytes) {
  if (matrix.data == nullptr) return;
  matrix.data = static_cast<const char*>(matrix.data) + rows * matrix.stride * element_bytes;
}

template <typename T, int kElements, bool kBackward>
cudaError_t launch(SwigluParams p, cudaStream_t stream) {
  const int64_t vectors_per_row = p.features / kElements;
  const int64_t most_rows = std::max(kMaxVectors / vectors_per_row, int64_t{1});
  while (p.rows > 0) {
    const int64_t rows = std::min(p.rows, most_rows);
    const auto count = static_cast<unsigned int>(rows * vectors_per_row);
    swiglu_kernel<T, kElements, kBackward>
        <<<(count + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
            p, static_cast<unsigned int>(vectors_per_row), count);
    if (const auto status = cudaGetLastError(); status != cudaSuccess) return status;
    for (Rows* matrix : {&p.gate, &p.up, &p.grad}) advance(*matrix, rows, sizeof(T));
    p.out = static_cast<T*>(p.out) + rows * p.features * (kBackward ? 2 : 1);
    p.rows -= rows;
  }
  return cudaSuccess;
}

template <typename T>
cudaError_t launch_of(const SwigluParams& p, cudaStream_t stream) {
  constexpr int kElements = kVectorBytes / sizeof(T);
  const Rows out{p.out, p.features};
  bool aligned = p.features % kElements == 0;
  for (const Rows& rows : {p.gate, p.up, p.grad, out}) {
    aligned = aligned && rows.is_aligned(sizeof(T));
  }
  if (p.grad.data == nullptr) {
    return aligned ? launch<T, kElements, false>(p, stream) : launch<T, 1, false>(p, stream);
  }
  return aligned ? launch<T, kElements, true>(p, stream) : launch<T, 1, true>(p, stream);
}

}  // namespace

cudaError_t launch_swiglu(const SwigluParams& p, cudaStream_t stream) {
  if (p.type == RowType::kFloat) return launch_of<float>(p, stream);
  if (p.type == RowType::kHalf) return launch_of<__half>(p, stream);
  return launch_of<__nv_bfloat16>(p, stream);
}

}  // namespace torch_overlap::cuda
