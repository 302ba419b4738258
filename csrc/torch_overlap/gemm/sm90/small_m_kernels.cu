#include "torch_overlap/gemm/sm90/small_m_kernels.h"

#include <algorithm>

#include "torch_overlap/common/cuda/dependent_launch_device.h"
#include "torch_overlap/gemm/sm90/small_m.cuh"

// A GEMM of few rows whose blocks start while the kernel before it still runs. They may load as
// much of the weight as their shared memory holds, and wait for that kernel before they load rows:
// behind a kernel that waits for other ranks, the time of its messages is that of the weight's
// first loads.
namespace torch_overlap::sm90 {
namespace {

// Shared memory of a block, of which an SM has 228 KiB. What is loaded early is bound by it.
constexpr int shared_bytes(bool loads_early) { return (loads_early ? 208 : 104) * 1024; }

template <typename In_, typename Out_, int kRows_, int kSplitK_, bool kLoadsEarly_>
struct SmallMGemmConfig {
  using In = In_;
  using Out = Out_;
  static constexpr int kRows = kRows_;
  static constexpr int kSplitK = kSplitK_;
  static constexpr bool kLoadsEarly = kLoadsEarly_;
  static constexpr bool kIsWeightKMajor = true;
  static constexpr int kNumMmaWarpgroups = 1;
  static constexpr int kFeatures = kSmallMFeatures;
  static constexpr int kNumMmaThreads = 128;  // the first threads of the block
  static constexpr int kThreads = kNumMmaThreads + 32;
  static constexpr int kDepth = kSmallMDepth;
  static_assert(kDepth * In::kBytes == 128);
  static constexpr int kSteps = 4;
  static constexpr int kWeightBytes = kFeatures * 128;
  static constexpr int kStageBytes = kWeightBytes + kRows * 128;
  static constexpr int kOutputBytes = kRows * 128;  // of 64 features
  static constexpr int kStages = (shared_bytes(kLoadsEarly) - 1024 - kOutputBytes) / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + kOutputBytes + 1024;
  static constexpr int kAccumulators = kRows / 2;
  // The sums of the cluster's other blocks reuse the memory of the stages.
  static constexpr int kSumsBytes = kAccumulators * 4 * kNumMmaThreads;  // of one block
  static_assert((kSplitK - 1) * kSumsBytes <= kStages * kStageBytes);
};

// The stages of all tiles of a block, one tile after the other.
template <typename Config>
struct TileStages {
  SmallMTile<Config> place;
  int i = 0;  // stage of the tile
  __device__ __forceinline__ void advance() {
    if (++i < place.count) return;
    i = 0;
    next_tile(place);
  }
  static __device__ __forceinline__ void next_tile(SmallMTile<Config>& place) {
    place.feature += static_cast<int>(gridDim.x) / Config::kSplitK * Config::kFeatures;
  }
};

// Runs on one thread.
template <typename Config>
__device__ __forceinline__ void load_stages(const SmallMGemmParams& p,
                                            const SmallMTile<Config>& place, int tiles,
                                            uint32_t shared, SharedBarriers<Config>& barriers) {
  const int count = tiles * place.count;
  const int early = Config::kLoadsEarly ? min(count, Config::kStages) : 0;
  const auto full = [&](int stage) { return shared_address(&barriers.full[stage]); };
  const auto memory = [&](int stage) { return shared + stage * Config::kStageBytes; };
  TileStages<Config> next{place};
  for (int i = 0; i < early; ++i, next.advance()) {
    barrier_arrive_expect_tx(full(i), Config::kStageBytes);
    load_weight<Config>(p.product, next.place, next.i, memory(i), full(i));
  }
  cuda::wait_for_kernel_before();
  cuda::let_next_kernel_launch();
  TileStages<Config> of_rows{place};
  for (int i = 0; i < early; ++i, of_rows.advance()) {
    load_rows<Config>(p.product, of_rows.place, of_rows.i, memory(i), full(i));
  }
  PipelineState<Config::kStages> at;
  at.phase = early > 0 ? 1 : 0;
  for (int i = early; i < count; ++i, next.advance()) {
    load_stage<Config>(p.product, next.place, next.i, shared, barriers, at);
  }
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

// Rounds and stores 64 features of all rows. `outputs` are Config::kOutputBytes of shared memory.
// Runs on a warpgroup.
template <typename Config>
__device__ __forceinline__ void store_small_m(const SmallMGemmParams& p, int first_feature,
                                              uint32_t outputs,
                                              const float (&sums)[Config::kAccumulators]) {
  using Out = typename Config::Out;
  const auto thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  named_barrier_sync(1, Config::kNumMmaThreads);  // the previous tile's outputs have been read
  const int chunk = thread / 32 * 2 + lane / 8 % 2;
#pragma unroll
  for (int w = 0; w < Config::kRows / 4; w += 4) {
    uint32_t rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 2 * (w + i);
      rounded[i] = pack(Out{}, sums[at], sums[at + 1]);
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
  const uint32_t outputs = shared + Config::kStages * Config::kStageBytes;
  SmallMTile<Config> place(p.product);
  init_small_m<Config>(barriers);
  const bool multiplies = threadIdx.x < Config::kNumMmaThreads;
  const auto load = [&](int tiles) {
    if (threadIdx.x == Config::kNumMmaThreads) {
      load_stages<Config>(p, place, tiles, shared, barriers);
    }
    __syncwarp();
  };
  float sums[Config::kAccumulators];
  PipelineState<Config::kStages> at;
  if constexpr (Config::kSplitK > 1) {
    if (multiplies) {
      multiply_small_m<Config>(place, shared, barriers, at, sums);
    } else {
      load(1);
    }
    add_parts<Config>(place, shared, multiplies, sums);
    if (multiplies && place.part == 0) store_small_m<Config>(p, place.feature, outputs, sums);
  } else if (multiplies) {
    for (; place.feature < p.product.n; TileStages<Config>::next_tile(place)) {
      multiply_small_m<Config>(place, shared, barriers, at, sums);
      store_small_m<Config>(p, place.feature, outputs, sums);
    }
  } else {
    const int tiles = ceil_div(p.product.n, Config::kFeatures) - static_cast<int>(blockIdx.x);
    load(ceil_div(tiles, static_cast<int>(gridDim.x)));
  }
}

template <typename In, typename Out, int kRows, int kSplitK, bool kLoadsEarly>
KernelInfo info() {
  using Config = SmallMGemmConfig<In, Out, kRows, kSplitK, kLoadsEarly>;
  return {.kernel = reinterpret_cast<const void*>(small_m_kernel<Config>),
          .rows = Config::kRows,
          .columns = Config::kFeatures,
          .cluster = std::max(kSplitK, 2),  // pairs, as ResidentGrid has them
          .rhs_box_bytes = 128,
          .depth = Config::kDepth,
          .threads = Config::kThreads,
          .shared_bytes = Config::kSharedBytes};
}

template <typename In, typename Out, int kRows, bool kLoadsEarly>
const KernelInfo* find_split(int split_k) {
  static const KernelInfo one = info<In, Out, kRows, 1, kLoadsEarly>();
  static const KernelInfo two = info<In, Out, kRows, 2, kLoadsEarly>();
  static const KernelInfo four = info<In, Out, kRows, 4, kLoadsEarly>();
  return split_k == 1 ? &one : split_k == 2 ? &two : split_k == 4 ? &four : nullptr;
}

template <typename In, typename Out, int kRows>
const KernelInfo* find_start(const SmallMKernelKey& key) {
  return key.loads_weight_early ? find_split<In, Out, kRows, true>(key.split_k)
                                : find_split<In, Out, kRows, false>(key.split_k);
}

template <typename In, typename Out>
const KernelInfo* find_rows(const SmallMKernelKey& key) {
  if (key.rows <= 16) return find_start<In, Out, 16>(key);
  return key.rows <= kMaxSmallMRows ? find_start<In, Out, kMaxSmallMRows>(key) : nullptr;
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
