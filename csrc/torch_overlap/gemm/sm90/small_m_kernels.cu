#include "torch_overlap/gemm/sm90/small_m_kernels.h"

#include "torch_overlap/common/cuda/dependent_launch_device.h"
#include "torch_overlap/gemm/sm90/small_m.cuh"

// A GEMM of few rows whose blocks start while the kernel before it still runs. They may load as
// much of the weight as their shared memory holds, and wait for that kernel before they load rows:
// behind a kernel that waits for other ranks, the time of its messages is that of the weight's
// first loads.
//
// Memory is left for other kernels that wait for ranks. Beside the blocks of this kernel an SM has
// at least 16 KiB of shared memory and half of its registers: enough for a block of those that
// exchange packets or lines (collectives/cuda). So a kernel that waits for this rank always starts.
namespace torch_overlap::sm90 {
namespace {

constexpr int kReservedBytes = 2048;  // barriers, alignment, and what CUDA takes of each block
constexpr int kHalfSharedBytes = 104 * 1024;
constexpr int kDeepSharedBytes = 2 * kHalfSharedBytes;

template <typename In_, typename Out_, int kRows_, int kSplitK_, bool kIsDeep>
struct SmallMGemmConfig {
  using In = In_;
  using Out = Out_;
  static constexpr int kRows = kRows_;
  static constexpr int kSplitK = kSplitK_;
  static constexpr bool kIsWeightKMajor = true;
  static constexpr int kNumMmaWarpgroups = 1;
  static constexpr int kFeatures = 64;
  static constexpr int kNumMmaThreads = 128;  // the first threads of the block
  static constexpr int kThreads = kNumMmaThreads + 32;
  static constexpr int kDepth = 128 / In::kBytes;
  static constexpr int kSteps = 4;
  static constexpr int kWeightBytes = kFeatures * 128;
  static constexpr int kStageBytes = kWeightBytes + kRows * 128;
  static constexpr int kStages =
      ((kIsDeep ? kDeepSharedBytes : kHalfSharedBytes) - kReservedBytes) / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + 1024;
  static constexpr int kAccumulators = kRows / 2;
  // The sums of the cluster's other blocks, and the outputs, reuse the memory of the stages.
  static constexpr int kSumsBytes = kAccumulators * 4 * kNumMmaThreads;  // of one block
  static constexpr int kExchangeBytes = (kSplitK - 1) * kSumsBytes;
  static_assert(kExchangeBytes + kRows * 128 <= kStages * kStageBytes);
};

// Runs on one thread.
template <typename Config>
__device__ __forceinline__ void load_stages(const SmallMGemmParams& p,
                                            const SmallMTile<Config>& place, uint32_t shared,
                                            SharedBarriers<Config>& barriers) {
  const int early = p.loads_weight_early ? min(place.count, Config::kStages) : 0;
  const auto full = [&](int stage) { return shared_address(&barriers.full[stage]); };
  for (int i = 0; i < early; ++i) {
    barrier_arrive_expect_tx(full(i), Config::kStageBytes);
    load_weight<Config>(p.product, place, i, shared + i * Config::kStageBytes, full(i));
  }
  cuda::wait_for_kernel_before();
  cuda::let_next_kernel_launch();
  for (int i = 0; i < early; ++i) {
    load_rows<Config>(p.product, place, i, shared + i * Config::kStageBytes, full(i));
  }
  load_small_m<Config>(p.product, place, shared, barriers, early);
}

// Returns the address in shared memory of four sums of this thread, of block `part` of the cluster.
template <typename Config>
__device__ __forceinline__ uint32_t address_of_sums(uint32_t shared, int part, int i) {
  return shared + (part - 1) * Config::kSumsBytes +
         (i / 4 * Config::kNumMmaThreads + static_cast<int>(threadIdx.x)) * 16;
}

// Adds the sums of a cluster's blocks to those of its first block, in order. All threads of all
// blocks call this; those that multiply have sums.
template <typename Config>
__device__ __forceinline__ void add_parts(const SmallMTile<Config>& place, uint32_t shared,
                                          bool has_sums, float (&sums)[Config::kAccumulators]) {
  cluster_sync();  // the stages have been read
  if (has_sums && place.part > 0) {
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; i += 4) {
      st_shared_cluster(address_of_sums<Config>(shared, place.part, i), 0,
                        {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]});
    }
  }
  cluster_sync();
  if (!has_sums || place.part > 0) return;
#pragma unroll
  for (int part = 1; part < Config::kSplitK; ++part) {
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; i += 4) {
      const uint4 given = load_vector(address_of_sums<Config>(shared, part, i));
      sums[i] += __uint_as_float(given.x);
      sums[i + 1] += __uint_as_float(given.y);
      sums[i + 2] += __uint_as_float(given.z);
      sums[i + 3] += __uint_as_float(given.w);
    }
  }
}

// Adds the bias to 64 features of all rows, rounds, and stores. `outputs` are kRows x 128 bytes of
// shared memory. Runs on a warpgroup.
template <typename Config>
__device__ __forceinline__ void store_small_m(const SmallMGemmParams& p, int first_feature,
                                              uint32_t outputs,
                                              const float (&sums)[Config::kAccumulators]) {
  using Out = typename Config::Out;
  const auto thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  float bias[2] = {0, 0};  // of this thread's two features
  if (p.bias != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int feature = first_feature + thread / 32 * 16 + lane / 4 + 8 * half;
      if (feature < p.product.n) bias[half] = widen(static_cast<const Out*>(p.bias)[feature]);
    }
  }
  const int chunk = thread / 32 * 2 + lane / 8 % 2;
#pragma unroll
  for (int w = 0; w < Config::kRows / 4; w += 4) {
    uint32_t rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 2 * (w + i);
      rounded[i] = pack(Out{}, sums[at] + bias[i % 2], sums[at + 1] + bias[i % 2]);
    }
    const int row = 4 * w + lane / 16 * 8 + lane % 8;
    stmatrix_x4_trans(outputs + row * 128 + ((chunk ^ (row & 7)) << 4), rounded);
  }
  named_barrier_sync(1, Config::kNumMmaThreads);
  const int vector = thread % 8;
  const int feature = first_feature + vector * 8;
  if (feature >= p.product.n) return;
  auto* const out = static_cast<Out*>(p.out) + feature;
#pragma unroll
  for (int row = thread / 8; row < Config::kRows; row += 16) {
    if (row >= p.product.m) break;
    *reinterpret_cast<uint4*>(out + row * p.out_stride) =
        load_vector(outputs + row * 128 + ((vector ^ (row & 7)) << 4));
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads)
    small_m_kernel(const __grid_constant__ SmallMGemmParams p) {
  extern __shared__ char dynamic_shared[];
  __shared__ SharedBarriers<Config> barriers;
  const uint32_t shared = (shared_address(dynamic_shared) + 1023) & ~uint32_t{1023};
  const SmallMTile<Config> place(p.product);
  init_small_m<Config>(barriers);
  const bool multiplies = threadIdx.x < Config::kNumMmaThreads;
  float sums[Config::kAccumulators];
  if (multiplies) {
    multiply_small_m<Config>(place, shared, barriers, sums);
  } else {
    if (threadIdx.x == Config::kNumMmaThreads) load_stages<Config>(p, place, shared, barriers);
    __syncwarp();
  }
  if constexpr (Config::kSplitK > 1) {
    add_parts<Config>(place, shared, multiplies, sums);
    if (place.part > 0) return;
  }
  if (!multiplies) return;
  // All warps have read the stages: in a cluster they have synchronized since.
  if constexpr (Config::kSplitK == 1) named_barrier_sync(1, Config::kNumMmaThreads);
  store_small_m<Config>(p, place.feature, shared + Config::kExchangeBytes, sums);
}

template <typename In, typename Out, int kRows, int kSplitK, bool kIsDeep>
KernelInfo info() {
  using Config = SmallMGemmConfig<In, Out, kRows, kSplitK, kIsDeep>;
  return {.kernel = reinterpret_cast<const void*>(small_m_kernel<Config>),
          .rows = Config::kRows,
          .columns = Config::kFeatures,
          .cluster = kSplitK,
          .rhs_box_bytes = 128,
          .depth = Config::kDepth,
          .threads = Config::kThreads,
          .shared_bytes = Config::kSharedBytes};
}

// Indexed by split_k: 1, 2, 4, and 2 with is_deep.
template <typename In, typename Out, int kRows>
const KernelInfo* find_split(const SmallMKernelKey& key) {
  static const KernelInfo all[] = {
      info<In, Out, kRows, 1, false>(), info<In, Out, kRows, 2, false>(),
      info<In, Out, kRows, 4, false>(), info<In, Out, kRows, 2, true>()};
  if (key.is_deep) return key.split_k == 2 ? &all[3] : nullptr;
  switch (key.split_k) {
    case 1:
      return &all[0];
    case 2:
      return &all[1];
    case 4:
      return &all[2];
    default:
      return nullptr;
  }
}

template <typename In, typename Out>
const KernelInfo* find_rows(const SmallMKernelKey& key) {
  if (key.rows <= 16) return find_split<In, Out, 16>(key);
  return key.rows <= kMaxSmallMRows ? find_split<In, Out, kMaxSmallMRows>(key) : nullptr;
}

}  // namespace

const KernelInfo* find_small_m_kernel(const SmallMKernelKey& key) {
  if (key.type == ElementType::bf16) return find_rows<Bf16, __nv_bfloat16>(key);
  return key.type == ElementType::f16 ? find_rows<F16, __half>(key) : nullptr;
}

cudaError_t launch_small_m(const KernelInfo& kernel, const SmallMGemmParams& params, int blocks,
                           cudaStream_t stream) {
  return launch(kernel, params, blocks, stream, /*is_dependent=*/true);
}

}  // namespace torch_overlap::sm90
