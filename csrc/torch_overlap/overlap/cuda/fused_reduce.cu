#include "torch_overlap/overlap/cuda/fused_reduce.h"

#include "torch_overlap/gemm/sm90/few_rows.cuh"
#include "torch_overlap/overlap/cuda/operation.cuh"
#include "torch_overlap/symm/cuda/line_device.h"

// GEMM + all-reduce of few rows in one kernel: a block computes a tile of features for all rows,
// sends its sums to the blocks of the same number on the other ranks straight from registers, and
// adds theirs to its own. A thread has the same rows and features on all ranks, so what it sends
// needs no order but that of the threads.
//
//   rank 0, block b                               rank 1, block b
//   weight, rows -> sums                          weight, rows -> sums
//   rounded sums ------------------------------>  slots[e % 2][0][b]
//   slots[e % 2][1][b]  <-----------------------  rounded sums
//   until all are there; total in the order of ranks, times factor, plus bias
//   rounded, turned in shared memory, stored
//
// By lines each 16 bytes have the epoch in them, which says that they are there; by vectors there
// is one flag for a block, behind a barrier and a fence: for what is large enough that a third more
// bytes take longer than those.
//
// Nothing is overwritten before it is read. A slot of operation e is that of e - 2. Who writes it
// has had, by the end of its kernel of e - 1, something of every rank of that operation, which that
// rank sent behind the end of its kernel of e - 2. So there is no meeting at the begin, and none at
// the end.
//
// No circle. A block waits for blocks of its own number on other ranks alone, and these for it; the
// hardware starts blocks in the order of their numbers.
namespace torch_overlap::cuda {
namespace {

using sm90::VectorType;

// One thread's part of a tile, rounded: two neighbouring rows of a feature in each word.
template <typename Config>
struct Part {
  static constexpr int kWords = Config::kOwnRows / 4;
  static constexpr int kLines = (kWords + 2) / 3;
  static constexpr int kVectors = kWords / 4;
  uint32_t words[3 * kLines];
};

// The sums of a tile that two blocks have of half of k each: each gets half of the rows. Threads
// have the same places in both. All threads of both blocks meet before and behind it.
template <typename Config>
__device__ __forceinline__ void give_half(const sm90::FewRowsPlace<Config>& place, uint32_t shared,
                                          const float (&sums)[Config::kAccumulators],
                                          float (&own)[Config::kOwnSums]) {
  const auto other = static_cast<uint32_t>(1 - place.part);
  const bool is_first = place.part == 0;
#pragma unroll
  for (int i = 0; i < Config::kOwnSums; i += 4) {
    float give[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float low = sums[i + j];
      const float high = sums[Config::kOwnSums + i + j];
      own[i + j] = is_first ? low : high;
      give[j] = is_first ? high : low;
    }
    sm90::store_at(shared + (i / 4 * Config::kMultipliers + threadIdx.x) * 16, other,
                   {give[0], give[1], give[2], give[3]});
  }
}

template <typename Config>
__device__ __forceinline__ void add_half(uint32_t shared, float (&own)[Config::kOwnSums]) {
#pragma unroll
  for (int i = 0; i < Config::kOwnSums; i += 4) {
    const uint4 given =
        sm90::load_vector(shared + (i / 4 * Config::kMultipliers + threadIdx.x) * 16);
    own[i] += __uint_as_float(given.x);
    own[i + 1] += __uint_as_float(given.y);
    own[i + 2] += __uint_as_float(given.z);
    own[i + 3] += __uint_as_float(given.w);
  }
}

// The exchange of one thread.
template <typename Config>
class Exchange {
  using P = Part<Config>;
  using Out = typename Config::Out;

 public:
  __device__ __forceinline__ Exchange(const FusedReduceParams& p, uint32_t epoch, int rows)
      : p_(p), epoch_(epoch), words_((rows + 7) / 8 * 2) {}

  // To all others; by vectors the flags come behind it.
  __device__ __forceinline__ void send(const P& mine) const {
    const ChannelWords& words = p_.operation.words;
    for (int i = 1; i < words.size; ++i) {
      const int peer = (words.rank + i) % words.size;
      char* const to = slot(peer, words.rank);
      if (p_.by_lines) {
#pragma unroll
        for (int j = 0; j < P::kLines; ++j) {
          if (3 * j >= words_) break;
          store_line(to + j * kStep, {mine.words[3 * j], mine.words[3 * j + 1],
                                      mine.words[3 * j + 2], epoch_});
        }
      } else {
#pragma unroll
        for (int j = 0; j < P::kVectors; ++j) {
          if (4 * j >= words_) break;
          *reinterpret_cast<uint4*>(to + j * kStep) = {mine.words[4 * j], mine.words[4 * j + 1],
                                                       mine.words[4 * j + 2],
                                                       mine.words[4 * j + 3]};
        }
      }
    }
  }

  // Behind a barrier of the threads that have sent, of the thread of that peer.
  __device__ __forceinline__ void tell(int peer) const {
    store_release(p_.tell[peer] + blockIdx.x, epoch_);
  }
  __device__ __forceinline__ bool told(int peer) const {
    return comes(p_.operation, p_.told[peer] + blockIdx.x, epoch_, WaitKind::chunk, peer);
  }

  // The sum of all ranks' parts, in their order. False: a wait has failed.
  __device__ __forceinline__ bool add_up(const P& mine, float (&total)[Config::kOwnSums]) const {
    const ChannelWords& words = p_.operation.words;
    bool is_good = true;
#pragma unroll 1
    for (int rank = 0; rank < words.size; ++rank) {
      P part = mine;
      if (rank != words.rank) is_good = take(rank, part) && is_good;
#pragma unroll
      for (int w = 0; w < P::kWords; ++w) {
        float a;
        float b;
        sm90::unpack(Out{}, part.words[w], a, b);
        total[2 * w] = rank == 0 ? a : total[2 * w] + a;
        total[2 * w + 1] = rank == 0 ? b : total[2 * w + 1] + b;
      }
    }
    return is_good;
  }

 private:
  static constexpr int kStep = Config::kMultipliers * 16;

  __device__ __forceinline__ char* slot(int owner, int source) const {
    const int bytes = (p_.by_lines ? P::kLines : P::kVectors) * kStep;
    const int64_t at = static_cast<int64_t>((epoch_ % 2) * p_.operation.words.size + source) *
                           gridDim.x + blockIdx.x;
    return p_.slots[owner] + at * bytes + threadIdx.x * 16;
  }

  __device__ __forceinline__ bool take(int source, P& part) const {
    const char* const from = slot(p_.operation.words.rank, source);
    if (!p_.by_lines) {
#pragma unroll
      for (int j = 0; j < P::kVectors; ++j) {
        if (4 * j >= words_) break;
        const uint4 vector = __ldcg(reinterpret_cast<const uint4*>(from + j * kStep));
        part.words[4 * j] = vector.x;
        part.words[4 * j + 1] = vector.y;
        part.words[4 * j + 2] = vector.z;
        part.words[4 * j + 3] = vector.w;
      }
      return true;
    }
    constexpr int kLooks = 64;  // before it is asked whether waiting makes sense
    for (int look = 1;; ++look) {
      bool is_there = true;
#pragma unroll
      for (int j = 0; j < P::kLines; ++j) {
        if (3 * j >= words_) break;
        const uint4 line = load_line(from + j * kStep);
        is_there = is_there && line.w == epoch_;
        part.words[3 * j] = line.x;
        part.words[3 * j + 1] = line.y;
        part.words[3 * j + 2] = line.z;
      }
      if (is_there) return true;
      if (look % kLooks == 0 && !comes_long(from, source)) return false;
    }
  }

  // Waits for each line by its word.
  __device__ __noinline__ bool comes_long(const char* from, int source) const {
    for (int j = 0; 3 * j < words_; ++j) {
      const auto* const word = reinterpret_cast<const uint32_t*>(from + j * kStep) + 3;
      if (!comes_late(p_.operation, word, epoch_, WaitKind::chunk, source)) return false;
    }
    return true;
  }

  const FusedReduceParams& p_;
  const uint32_t epoch_;
  const int words_;  // of a thread that rows of the product have
};

// 8-bit operands: sums [features, rows] become those of the values.
template <typename Config>
__device__ __forceinline__ void scale(const FusedReduceParams& p, int feature, int row,
                                      float (&sums)[Config::kOwnSums]) {
  if (!p.scaled_by_row) {
    sm90::multiply_by(*p.rows_scale * *p.weight_scale, sums);
    return;
  }
  const float first = feature < p.product.n ? p.weight_scale[feature] : 0.0F;
  const float second = feature + 8 < p.product.n ? p.weight_scale[feature + 8] : 0.0F;
#pragma unroll
  for (int i = 0; i < Config::kOwnSums; i += 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = row + 2 * i + j;
      const float factor = at < p.product.m ? p.rows_scale[at] : 0.0F;
      sums[i + j] *= first * factor;
      sums[i + 2 + j] *= second * factor;
    }
  }
}

// Bias and rounding; two neighbouring rows of a feature in each word.
template <typename Config>
__device__ __forceinline__ void finish(const FusedReduceParams& p, int feature,
                                       const float (&total)[Config::kOwnSums],
                                       Part<Config>& rounded) {
  using Out = typename Config::Out;
  float bias[2] = {0, 0};
  if (p.bias != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = feature + 8 * half;
      if (at < p.product.n) bias[half] = sm90::widen(static_cast<const Out*>(p.bias)[at]);
    }
  }
#pragma unroll
  for (int w = 0; w < Part<Config>::kWords; ++w) {
    rounded.words[w] = sm90::pack(Out{}, total[2 * w] * p.factor + bias[w % 2],
                                  total[2 * w + 1] * p.factor + bias[w % 2]);
  }
}

// The outputs of a warpgroup, by way of shared memory: rows of 64 features under the 128-byte
// swizzle.
template <typename Config>
__device__ __forceinline__ void store(const FusedReduceParams& p, const Part<Config>& rounded,
                                      uint32_t shared, int first_feature, int first_row) {
  using Out = typename Config::Out;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = thread % 32;
  const int chunk = thread / 32 * 2 + lane / 8 % 2;
#pragma unroll
  for (int w = 0; w < Part<Config>::kWords; w += 4) {
    const int row = w / 2 * 8 + lane / 16 * 8 + lane % 8;
    sm90::store_transposed(shared + row * 128 + ((chunk ^ (row & 7)) << 4), rounded.words + w);
  }
  sm90::meet_threads(1 + static_cast<int>(threadIdx.x) / 128, 128);
  const int vector = thread % 8;
  const int feature = first_feature + vector * 8;
  if (feature >= p.product.n) return;
  auto* const out = static_cast<Out*>(p.out) + feature;
#pragma unroll 4
  for (int row = thread / 8; row < Config::kOwnRows; row += 16) {
    if (first_row + row >= p.product.m) break;
    const uint4 data = sm90::load_vector(shared + row * 128 + ((vector ^ (row & 7)) << 4));
    *reinterpret_cast<uint4*>(out + static_cast<int64_t>(first_row + row) * p.product.n) = data;
  }
}

// What a warpgroup that multiplies does with its sums.
template <typename Config>
__device__ __forceinline__ bool reduce(const FusedReduceParams& p, const OperationEntry& entry,
                                       bool is_good, const sm90::FewRowsPlace<Config>& place,
                                       uint32_t shared, float (&own)[Config::kOwnSums]) {
  using Out = typename Config::Out;
  const ChannelWords& words = p.operation.words;
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int first_feature = place.feature + 64 * group;
  const int feature = first_feature + thread / 32 * 16 + thread % 32 / 4;
  const int first_row = place.part * Config::kOwnRows;
  if constexpr (Config::In::kBytes == 1) {
    scale<Config>(p, feature, first_row + 2 * (thread % 4), own);
  }
  Part<Config> mine{};
#pragma unroll
  for (int w = 0; w < Part<Config>::kWords; ++w) {
    mine.words[w] = sm90::pack(Out{}, own[2 * w], own[2 * w + 1]);
  }
  const int rows = max(0, min(Config::kOwnRows, p.product.m - first_row));
  const Exchange<Config> exchange(p, entry.epoch, rows);
  if (is_good) exchange.send(mine);
  const auto peer = static_cast<int>(threadIdx.x);
  if (!p.by_lines) {
    sm90::meet_threads(7, Config::kMultipliers);
    if (is_peer(words)) {
      if (is_good) exchange.tell(peer);
      is_good = exchange.told(peer) && is_good;
    }
    __syncwarp();
    sm90::meet_threads(7, Config::kMultipliers);
  }
  is_good = exchange.add_up(mine, own) && is_good;
  finish<Config>(p, feature, own, mine);
  store<Config>(p, mine, shared + Config::kGivenBytes + group * Config::kOwnRows * 128,
                first_feature, first_row);
  return is_good;
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fused_reduce_kernel(__grid_constant__ const FusedReduceParams p) {
  extern __shared__ char dynamic[];
  __shared__ sm90::FewRowsBarriers<Config> barriers;
  const uint32_t shared = (sm90::shared_address(dynamic) + 1023) & ~uint32_t{1023};
  const OperationParams& operation = p.operation;
  const ChannelWords& words = operation.words;
  const sm90::FewRowsPlace<Config> place(p.product);
  sm90::init_few_rows(barriers);
  const bool multiplies = threadIdx.x < Config::kMultipliers;
  bool is_good = true;
  if (!multiplies) {
    if constexpr (Config::kGroups > 1) sm90::fewer_registers<40>();
    if (threadIdx.x == Config::kMultipliers) {
      sm90::load_few_rows<Config>(p.product, place, shared, barriers);
    }
    __syncwarp();
    if constexpr (Config::kSplit > 1) {
      sm90::cluster_sync();
      sm90::cluster_sync();
    }
  } else {
    if constexpr (Config::kGroups > 1) sm90::more_registers<232>();
    // Asked for now, and there when the sums are.
    const OperationEntry entry = enter_operation(operation);
    is_good = !has_failed(operation.control);
    const auto peer = static_cast<int>(threadIdx.x);
    const bool asks = blockIdx.x == 0 && is_peer(words);
    if (asks && is_good) tell_entry(p.begin[peer], operation.rows, entry.epoch);
    float sums[Config::kAccumulators];
    sm90::multiply_few_rows<Config>(place, shared, barriers, sums);
    float own[Config::kOwnSums];
    if constexpr (Config::kSplit > 1) {
      sm90::cluster_sync();  // all stages have been read
      give_half<Config>(place, shared, sums, own);
      sm90::cluster_sync();
      add_half<Config>(shared, own);
    } else {
#pragma unroll
      for (int i = 0; i < Config::kOwnSums; ++i) own[i] = sums[i];
    }
    is_good = reduce<Config>(p, entry, is_good, place, shared, own);
    if (asks) {
      const bool has_begun =
          comes(operation, p.begun[peer], entry.epoch, WaitKind::begin, peer) &&
          check_rows(words, load_relaxed(p.begun[peer] + 1), operation.rows, peer,
                     operation.control);
      is_good = has_begun && is_good;
    } else if (blockIdx.x == 0 && peer == words.rank) {
      is_good = is_alone(operation, entry) && is_good;
    }
  }
  is_good = __syncthreads_and(static_cast<int>(is_good)) != 0;
  if (!is_good && is_peer(words)) tell_gone(operation, static_cast<int>(threadIdx.x));
  if (threadIdx.x == 0) {
    const uint32_t epoch = *static_cast<const volatile uint32_t*>(words.epoch) + 1;
    if (atomicAdd(words.ticket, 1U) + 1 == gridDim.x) leave_operation(operation, epoch, is_good);
  }
}

// What of a configuration does not depend on types and layouts.
template <int kRows, int kGroups, int kSplit>
struct Shape {
  template <typename In, typename Out, bool kWeightAlongK>
  static FusedReduceKernel kernel() {
    using Config = sm90::FewRowsConfig<In, Out, kRows, kGroups, kSplit, kWeightAlongK>;
    constexpr int kStep = Config::kMultipliers * 16;
    return {.kernel = reinterpret_cast<const void*>(fused_reduce_kernel<Config>),
            .rows = kRows,
            .features = Config::kFeatures,
            .split = kSplit,
            .depth = Config::kDepth,
            .threads = Config::kThreads,
            .shared_bytes = Config::kSharedBytes,
            .line_bytes = Part<Config>::kLines * kStep,
            .vector_bytes = Part<Config>::kVectors * kStep};
  }
};

template <typename In, typename Out, bool kWeightAlongK, typename... Shapes>
std::span<const FusedReduceKernel> kernels_of() {
  static const FusedReduceKernel all[] = {Shapes::template kernel<In, Out, kWeightAlongK>()...};
  return all;
}

template <typename In, typename Out, bool kWeightAlongK = true>
std::span<const FusedReduceKernel> kernels() {
  return kernels_of<In, Out, kWeightAlongK, Shape<16, 1, 1>, Shape<32, 1, 1>, Shape<64, 1, 1>,
                    Shape<128, 1, 1>, Shape<256, 1, 2>, Shape<256, 2, 2>>();
}

template <typename In>
std::span<const FusedReduceKernel> kernels_into(VectorType out) {
  return out == VectorType::bf16 ? kernels<In, __nv_bfloat16>() : kernels<In, __half>();
}

}  // namespace

std::span<const FusedReduceKernel> fused_reduce_kernels(const sm90::KernelKey& key) {
  using enum sm90::OperandType;
  const auto is = [&](sm90::OperandType rows, sm90::OperandType weight) {
    return key.lhs == rows && key.rhs == weight;
  };
  if (is(bf16, bf16)) {
    return key.rhs_along_k ? kernels<sm90::Bf16, __nv_bfloat16>()
                           : kernels<sm90::Bf16, __nv_bfloat16, false>();
  }
  if (is(f16, f16)) {
    return key.rhs_along_k ? kernels<sm90::F16, __half>() : kernels<sm90::F16, __half, false>();
  }
  if (!key.rhs_along_k) return {};
  // The instruction has the weight first.
  if (is(e4m3, e4m3)) return kernels_into<sm90::E4m3E4m3>(key.out);
  if (is(e4m3, e5m2)) return kernels_into<sm90::E5m2E4m3>(key.out);
  if (is(e5m2, e4m3)) return kernels_into<sm90::E4m3E5m2>(key.out);
  return {};
}

cudaError_t launch_fused_reduce(const FusedReduceKernel& kernel, const FusedReduceParams& params,
                                int blocks, cudaStream_t stream) {
  void* arguments[] = {const_cast<FusedReduceParams*>(&params)};
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned int>(kernel.split), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned int>(blocks));
  config.blockDim = dim3(static_cast<unsigned int>(kernel.threads));
  config.dynamicSmemBytes = static_cast<size_t>(kernel.shared_bytes);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelExC(&config, kernel.kernel, arguments);
}

}  // namespace torch_overlap::cuda
