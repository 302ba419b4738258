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

// Shared memory of a block, of which an SM has 228 KiB. What is loaded early is bound by it. Half
// of it is enough otherwise, except for stages of many rows.
constexpr int shared_bytes(bool loads_early, int rows) {
  return (loads_early || rows > 32 ? 208 : 104) * 1024;
}

template <typename In_, int kRows_, int kSplitK_, bool kLoadsEarly_>
struct SmallMGemmConfig {
  using In = In_;
  static constexpr int kRows = kRows_;
  static constexpr int kSplitK = kSplitK_;
  static constexpr bool kLoadsEarly = kLoadsEarly_;
  static constexpr bool kIsWeightKMajor = true;
  static constexpr int kNumMmaWarpgroups = 1;
  static constexpr int kFeatures = kSmallMFeatures;
  static constexpr int kNumMmaThreads = 128;  // the first threads of the block
  static constexpr int kThreads = kNumMmaThreads + 32;
  static constexpr int kDepth = kSmallMDepthBytes / In::kBytes;
  static constexpr int kSteps = 4;
  static constexpr int kWeightBytes = kFeatures * 128;
  static constexpr int kStageBytes = kWeightBytes + kRows * 128;
  static constexpr int kOutputBytes = kRows * 128;  // of 64 features
  static constexpr int kStages =
      (shared_bytes(kLoadsEarly, kRows) - 1024 - kOutputBytes) / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + kOutputBytes + 1024;
  static constexpr int kAccumulators = kRows / 2;
  // The sums of the cluster's other blocks reuse the memory of the stages.
  static constexpr int kSumsBytes = kAccumulators * 4 * kNumMmaThreads;  // of one block
  static_assert((kSplitK - 1) * kSumsBytes <= kStages * kStageBytes);
};

// The features of a block, a tile at a time. Its last tile may have fewer features.
template <typename Config>
struct BlockTiles : SmallMTile<Config> {
  int end;
  int narrow;  // first feature of the last tile if that is narrower, otherwise none
  __device__ __forceinline__ explicit BlockTiles(const SmallMGemmParams& p)
      : SmallMTile<Config>(p.product) {
    this->feature = static_cast<int>(blockIdx.x) / Config::kSplitK * p.block_features;
    narrow = this->feature + p.block_features / Config::kFeatures * Config::kFeatures;
    end = min(this->feature + p.block_features, p.product.n);
  }
  __device__ __forceinline__ bool has_tile() const { return this->feature < end; }
  __device__ __forceinline__ void next() { this->feature += Config::kFeatures; }
};

// The stages of all tiles of a block, one tile after the other. It runs on one thread.
template <typename Config>
struct TileStages {
  BlockTiles<Config> tiles;
  int i = 0;  // stage of the tile
  __device__ __forceinline__ void advance() {
    if (++i < tiles.count) return;
    i = 0;
    tiles.next();
  }
  __device__ __forceinline__ void load_weight(const SmallMGemmParams& p, uint32_t to,
                                              uint32_t full) const {
    const bool is_narrow = tiles.feature == tiles.narrow;
    const int features = is_narrow ? p.block_features % Config::kFeatures : Config::kFeatures;
    barrier_arrive_expect_tx(full, (Config::kRows + features) * 128);
    tma_load_2d(to, is_narrow ? &p.weight_narrow : &p.product.weight, full,
                (tiles.first + i) * Config::kDepth, tiles.feature);
  }
  __device__ __forceinline__ void load_rows(const SmallMGemmParams& p, uint32_t to,
                                            uint32_t full) const {
    sm90::load_rows<Config>(p.product, tiles, i, to, full);
  }
};

// Runs on one thread.
template <typename Config>
__device__ __forceinline__ void load_stages(const SmallMGemmParams& p,
                                            const BlockTiles<Config>& tiles, uint32_t shared,
                                            SharedBarriers<Config>& barriers) {
  const int count = max(0, ceil_div(tiles.end - tiles.feature, Config::kFeatures)) * tiles.count;
  const int early = Config::kLoadsEarly ? min(count, Config::kStages) : 0;
  const auto full = [&](int stage) { return shared_address(&barriers.full[stage]); };
  const auto memory = [&](int stage) { return shared + stage * Config::kStageBytes; };
  TileStages<Config> next{tiles};
  for (int i = 0; i < early; ++i, next.advance()) next.load_weight(p, memory(i), full(i));
  cuda::wait_for_kernel_before();
  cuda::let_next_kernel_launch();
  TileStages<Config> of_rows{tiles};
  for (int i = 0; i < early; ++i, of_rows.advance()) of_rows.load_rows(p, memory(i), full(i));
  PipelineState<Config::kStages> at;
  at.phase = early > 0 ? 1 : 0;
  for (int i = early; i < count; ++i, next.advance(), at.advance()) {
    barrier_wait(shared_address(&barriers.empty[at.stage]), at.phase ^ 1);
    next.load_weight(p, memory(at.stage), full(at.stage));
    next.load_rows(p, memory(at.stage), full(at.stage));
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

// The scales of the sums that a thread holds (wgmma.cuh), read from L2: what another kernel wrote
// before this one started need not be in L1. Runs on a warpgroup.
template <typename Config>
class Scales {
 public:
  // Before the kernel before has ended, like the weight's loads.
  __device__ __forceinline__ void load_of_features(const SmallMGemmParams& p, int first_feature) {
    if constexpr (!Config::kLoadsEarly) cuda::wait_for_kernel_before();
    const int feature = first_feature + static_cast<int>(threadIdx.x) / 32 * 16 + lane() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = p.scaled_by_row ? min(feature + 8 * half, p.product.n - 1) : 0;
      of_features_[half] = __ldcg(p.weight_scale + at);
    }
  }
  // Waits for the kernel before.
  __device__ __forceinline__ void load_of_rows(const SmallMGemmParams& p) {
    cuda::wait_for_kernel_before();
#pragma unroll
    for (int i = 0; i < kRowScales; ++i) {
      const int row = 8 * (i / 2) + 2 * (lane() % 4) + i % 2;
      of_rows_[i] = __ldcg(p.rows_scale + (p.scaled_by_row ? min(row, p.product.m - 1) : 0));
    }
  }
  __device__ __forceinline__ void apply(float (&sums)[Config::kAccumulators]) const {
#pragma unroll
    for (int i = 0; i < Config::kAccumulators; ++i) {
      sums[i] *= of_rows_[i / 4 * 2 + i % 2] * of_features_[i / 2 % 2];
    }
  }

 private:
  static constexpr int kRowScales = Config::kAccumulators / 2;
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

  float of_features_[2];
  float of_rows_[kRowScales];
};

// 16-bit operands have none.
template <typename Config>
  requires(Config::In::kBytes == 2)
class Scales<Config> {
 public:
  __device__ __forceinline__ void load_of_features(const SmallMGemmParams&, int) {}
  __device__ __forceinline__ void load_of_rows(const SmallMGemmParams&) {}
  __device__ __forceinline__ void apply(float (&)[Config::kAccumulators]) const {}
};

// Rounds and stores a tile of all rows. `outputs` are Config::kOutputBytes of shared memory.
// Runs on a warpgroup.
template <typename Config>
__device__ __forceinline__ void store_small_m(const SmallMGemmParams& p,
                                              const BlockTiles<Config>& tiles, uint32_t outputs,
                                              const float (&sums)[Config::kAccumulators]) {
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
      rounded[i] = p.out_is_f16 ? pack(__half{}, sums[at], sums[at + 1])
                                : pack(__nv_bfloat16{}, sums[at], sums[at + 1]);
    }
    const int row = 4 * w + lane / 16 * 8 + lane % 8;
    stmatrix_x4_trans(outputs + row * 128 + ((chunk ^ (row & 7)) << 4), rounded);
  }
  named_barrier_sync(1, Config::kNumMmaThreads);
  const int vector = thread % 8;
  const int feature = tiles.feature + vector * 8;
  if (feature >= tiles.end) return;
  auto* const out = static_cast<uint16_t*>(p.out) + feature;
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
  BlockTiles<Config> tiles(p);
  init_small_m<Config>(barriers);
  const bool multiplies = threadIdx.x < Config::kNumMmaThreads;
  if (!multiplies) {
    if (threadIdx.x == Config::kNumMmaThreads) load_stages<Config>(p, tiles, shared, barriers);
    __syncwarp();
  }
  float sums[Config::kAccumulators];
  Scales<Config> scales;
  PipelineState<Config::kStages> at;
  if constexpr (Config::kSplitK > 1) {  // one tile
    const bool stores = multiplies && tiles.part == 0;
    if (stores) {
      scales.load_of_features(p, tiles.feature);
      scales.load_of_rows(p);
    }
    if (multiplies) multiply_small_m<Config>(tiles, shared, barriers, at, sums);
    add_parts<Config>(tiles, shared, multiplies, sums);
    if (stores) {
      scales.apply(sums);
      store_small_m<Config>(p, tiles, outputs, sums);
    }
  } else if (multiplies) {
    scales.load_of_rows(p);
    for (; tiles.has_tile(); tiles.next()) {
      scales.load_of_features(p, tiles.feature);
      multiply_small_m<Config>(tiles, shared, barriers, at, sums);
      scales.apply(sums);
      store_small_m<Config>(p, tiles, outputs, sums);
    }
  }
}

template <typename In, int kRows, int kSplitK, bool kLoadsEarly>
KernelInfo info() {
  using Config = SmallMGemmConfig<In, kRows, kSplitK, kLoadsEarly>;
  return {.kernel = reinterpret_cast<const void*>(small_m_kernel<Config>),
          .rows = Config::kRows,
          .columns = Config::kFeatures,
          .cluster = std::max(kSplitK, 2),  // pairs, as ResidentGrid has them
          .rhs_box_bytes = 128,
          .depth = Config::kDepth,
          .threads = Config::kThreads,
          .shared_bytes = Config::kSharedBytes};
}

template <typename In, int kRows, bool kLoadsEarly>
const KernelInfo* find_split(int split_k) {
  static const KernelInfo one = info<In, kRows, 1, kLoadsEarly>();
  static const KernelInfo two = info<In, kRows, 2, kLoadsEarly>();
  static const KernelInfo four = info<In, kRows, 4, kLoadsEarly>();
  return split_k == 1 ? &one : split_k == 2 ? &two : split_k == 4 ? &four : nullptr;
}

template <typename In, int kRows>
const KernelInfo* find_start(const SmallMKernelKey& key) {
  return key.loads_weight_early ? find_split<In, kRows, true>(key.split_k)
                                : find_split<In, kRows, false>(key.split_k);
}

template <typename In>
const KernelInfo* find_rows(const SmallMKernelKey& key) {
  if (key.rows <= 16) return find_start<In, 16>(key);
  if (key.rows <= 32) return find_start<In, 32>(key);
  if constexpr (In::kBytes == 1) {
    if (key.rows <= kMaxSmallMRows8Bit) return find_start<In, kMaxSmallMRows8Bit>(key);
  }
  return nullptr;
}

}  // namespace

const KernelInfo* find_small_m_kernel(const SmallMKernelKey& key) {
  switch (key.type) {
    case OperandType::bf16:
      return find_rows<Bf16>(key);
    case OperandType::f16:
      return find_rows<F16>(key);
    case OperandType::e4m3:
      return find_rows<E4m3E4m3>(key);
    default:
      return nullptr;
  }
}

cudaError_t launch_small_m(const KernelInfo& kernel, const SmallMGemmParams& params, int blocks,
                           bool is_dependent, cudaStream_t stream) {
  return launch(kernel, params, blocks, stream, is_dependent);
}

}  // namespace torch_overlap::sm90
