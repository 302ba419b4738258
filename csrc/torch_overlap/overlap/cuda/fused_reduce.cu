#include "torch_overlap/overlap/cuda/fused_reduce.h"

#include <utility>

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
// Nothing is overwritten before it is read. The memory of operation e was that of e - 2, and
// nothing of it that of e - 1, whatever their sizes. Who writes it has had, by the end of its
// kernel of e - 1, something of every rank of that operation, which that rank sent behind the end
// of its kernel of e - 2. So there is no meeting at the begin, and none at the end.
//
// No circle. A block waits for blocks of its own number on other ranks alone, and these for it.
// Where not all have an SM, GPUs start them in the order of their numbers, though CUDA does not
// promise it.
namespace torch_overlap::cuda {
namespace {

// One thread's part of a tile, rounded: two neighbouring rows of a feature in each word, 16 rows in
// four words.
template <typename Config>
struct Part {
  static constexpr int kWords = Config::kOwnRows / 4;
  static constexpr int kLines = (kWords + 2) / 3;
  static constexpr bool kHasLines = kWords <= 16;  // registers for all of them at once
  static constexpr int kVectors = kWords / 4;
  // From a line or vector of a thread to its next one.
  static constexpr int kStep = Config::kMultipliers * 16;
  // Outputs lie in shared memory behind what the other half gives, where stages were.
  static_assert(Config::kGivenBytes + Config::kOwnRows * Config::kFeatures * 2 <=
                Config::kStages * Config::kStageBytes);
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

// Where a block of `source` writes on `owner` in an operation.
template <typename Config>
__device__ __forceinline__ char* slot_of(const FusedReduceParams& p, uint32_t epoch, int owner,
                                         int source) {
  using P = Part<Config>;
  const int bytes = (p.by_lines ? P::kLines : P::kVectors) * P::kStep;
  const int64_t block = static_cast<int64_t>(source) * gridDim.x + blockIdx.x;
  return p.slots[owner] + (epoch % 2 == 0 ? 0 : p.odd_at) + block * bytes;
}

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

// What becomes of the sums of a warpgroup's 64 features.
template <typename Config>
class Outputs {
  using Out = typename Config::Out;

 public:
  __device__ __forceinline__ Outputs(const FusedReduceParams& p,
                                     const sm90::FewRowsPlace<Config>& place, uint32_t shared)
      : p_(p),
        group_(static_cast<int>(threadIdx.x) / 128),
        first_feature_(place.feature + 64 * group_),
        first_row_(place.part * Config::kOwnRows),
        shared_(shared + Config::kGivenBytes + group_ * Config::kOwnRows * 128) {
    if (p.bias == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = feature() + 8 * half;
      if (at < p.product.n) bias_[half] = sm90::widen(static_cast<const Out*>(p.bias)[at]);
    }
  }

  // Of this thread: the first one of two, 8 apart; and the first row.
  __device__ __forceinline__ int feature() const {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    return first_feature_ + thread / 32 * 16 + thread % 32 / 4;
  }
  __device__ __forceinline__ int row() const {
    return first_row_ + 2 * (static_cast<int>(threadIdx.x) % 4);
  }
  // Of this block, that the product has.
  __device__ __forceinline__ int rows() const {
    return max(0, min(Config::kOwnRows, p_.product.m - first_row_));
  }

  // Rounds and stores them.
  __device__ __forceinline__ void put(const float (&total)[Config::kOwnSums]) const {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const int lane = thread % 32;
    const int chunk = thread / 32 * 2 + lane / 8 % 2;
#pragma unroll
    for (int w = 0; w < Part<Config>::kWords; w += 4) {
      uint32_t rounded[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rounded[i] = sm90::pack(Out{}, total[2 * (w + i)] * p_.factor + bias_[i % 2],
                                total[2 * (w + i) + 1] * p_.factor + bias_[i % 2]);
      }
      const int row = 4 * w + lane / 16 * 8 + lane % 8;
      sm90::store_transposed(shared_ + row * 128 + ((chunk ^ (row & 7)) << 4), rounded);
    }
    sm90::meet_threads(1 + group_, 128);
    const int vector = thread % 8;
    const int feature = first_feature_ + vector * 8;
    if (feature >= p_.product.n) return;
    auto* const out = static_cast<Out*>(p_.out) + feature;
#pragma unroll 4
    for (int row = thread / 8; row < Config::kOwnRows; row += 16) {
      if (first_row_ + row >= p_.product.m) break;
      *reinterpret_cast<uint4*>(out + static_cast<int64_t>(first_row_ + row) * p_.product.n) =
          sm90::load_vector(shared_ + row * 128 + ((vector ^ (row & 7)) << 4));
    }
  }

 private:
  const FusedReduceParams& p_;
  const int group_;
  const int first_feature_;
  const int first_row_;
  const uint32_t shared_;
  float bias_[2] = {0, 0};
};

// total += the words of one rank, of which rank 0 comes first.
template <typename Out, int kSums>
__device__ __forceinline__ void add(int rank, const uint32_t* words, float (&total)[kSums]) {
#pragma unroll
  for (int w = 0; w < kSums / 2; ++w) {
    float a;
    float b;
    sm90::unpack(Out{}, words[w], a, b);
    total[2 * w] = rank == 0 ? a : total[2 * w] + a;
    total[2 * w + 1] = rank == 0 ? b : total[2 * w + 1] + b;
  }
}

// What all ranks have, in their order: `mine`, and of another one what take(rank, part) brings.
template <typename Config, int kWords, typename Take>
__device__ __forceinline__ void put_sums(const ChannelWords& words, const Outputs<Config>& outputs,
                                         const uint32_t (&mine)[kWords], const Take& take) {
  using Out = typename Config::Out;
  float total[Config::kOwnSums];
#pragma unroll 1
  for (int rank = 0; rank < words.size; ++rank) {
    if (rank == words.rank) {
      add<Out>(rank, mine, total);
      continue;
    }
    uint32_t part[kWords] = {};
    take(rank, part);
    add<Out>(rank, part, total);
  }
  outputs.put(total);
}

// Whether what carries the epoch `seen` is of this operation, or as far ahead of it as its sender
// may be. Words that no operation has written for long are not.
__device__ __forceinline__ bool is_of(uint32_t seen, uint32_t epoch, uint32_t ahead) {
  return seen - epoch <= ahead;
}

// Of a word of `source` that has been looked at for a while. False: a wait has failed.
__device__ __noinline__ bool comes_long(const FusedReduceParams& p, const uint32_t* word,
                                        uint32_t epoch, uint32_t ahead, int source) {
  const OperationParams& operation = p.operation;
  const uint32_t* const gone = operation.words.gone;
  uint32_t seen;
  const WaitEnd end = look_until(
      operation.control, word,
      [=](uint32_t now) { return is_of(now, epoch, ahead) || load_acquire(gone) != 0; },
      kManyLookAtHostNs, seen);
  if (end == WaitEnd::failed) return false;
  if (end == WaitEnd::there && is_of(load_acquire(word), epoch, ahead)) {
    return !has_failed(operation.control);
  }
  const BegunEntry* const entry = p.begun[source] + entry_at(epoch);
  const BegunEntry begun = load_acquire(entry);
  WaitRecord what{};
  what.kind = WaitKind::chunk;
  if (end == WaitEnd::there) {
    what.kind = WaitKind::gone;
  } else if (!reached(begun, epoch)) {  // no block but the first waits for that
    what.kind = WaitKind::begin;
    seen = come_to(entry, begun, epoch);
  }
  what.window = operation.words.id;
  what.peer = source;
  what.expected = epoch;
  give_up(operation.control, what, seen);
  return false;
}

constexpr int kLooks = 64;  // before it is asked whether waiting makes sense

// Waits for the word of a source behind its vectors; it may be at the next operation. False: a wait
// has failed.
__device__ __forceinline__ bool is_told(const FusedReduceParams& p, const uint32_t* word,
                                        uint32_t epoch, int source) {
#pragma unroll 1
  for (int look = 0; look < kLooks; ++look) {
    if (is_of(load_acquire(word), epoch, 1)) return true;
  }
  return comes_long(p, word, epoch, 1, source);
}

// Waits for each line of a thread by its word, which stays until the source has heard of this rank.
template <typename Config>
__device__ __forceinline__ bool lines_come(const FusedReduceParams& p, const char* from, int lines,
                                           uint32_t epoch, int source) {
#pragma unroll 1
  for (int j = 0; j < lines; ++j) {
    const auto* const word = reinterpret_cast<const uint32_t*>(from + j * Part<Config>::kStep) + 3;
    if (!comes_long(p, word, epoch, 0, source)) return false;
  }
  return true;
}

// Of a thread: to all others, and from all. False: a wait has failed.
template <typename Config>
__device__ __forceinline__ bool reduce_lines(const FusedReduceParams& p, uint32_t epoch,
                                             bool may_send, const Outputs<Config>& outputs,
                                             const float (&own)[Config::kOwnSums]) {
  using P = Part<Config>;
  using Out = typename Config::Out;
  const ChannelWords& words = p.operation.words;
  const int lines = ((outputs.rows() + 7) / 8 * 2 + 2) / 3;
  uint32_t mine[3 * P::kLines] = {};
#pragma unroll
  for (int w = 0; w < P::kWords; ++w) mine[w] = sm90::pack(Out{}, own[2 * w], own[2 * w + 1]);
  for (int i = 1; i < words.size && may_send; ++i) {
    const int peer = (words.rank + i) % words.size;
    char* const to = slot_of<Config>(p, epoch, peer, words.rank) + threadIdx.x * 16;
#pragma unroll
    for (int j = 0; j < P::kLines; ++j) {
      if (j >= lines) break;
      store_line(to + j * P::kStep, {mine[3 * j], mine[3 * j + 1], mine[3 * j + 2], epoch});
    }
  }
  bool is_good = may_send;
  const auto take = [&](int source, uint32_t (&part)[3 * P::kLines]) {
    const char* const from = slot_of<Config>(p, epoch, words.rank, source) + threadIdx.x * 16;
    for (int look = 1;; ++look) {
      bool is_there = true;
#pragma unroll
      for (int j = 0; j < P::kLines; ++j) {
        if (j >= lines) break;
        const uint4 line = load_line(from + j * P::kStep);
        is_there = is_there && is_of(line.w, epoch, 0);
        part[3 * j] = line.x;
        part[3 * j + 1] = line.y;
        part[3 * j + 2] = line.z;
      }
      if (is_there) return true;
      if (look % kLooks == 0 && !lines_come<Config>(p, from, lines, epoch, source)) return false;
    }
  };
  put_sums(words, outputs, mine, [&](int source, uint32_t (&part)[3 * P::kLines]) {
    is_good = is_good && take(source, part);
  });
  return is_good;
}

// Barriers of the block; 1 and 2 are those of the warpgroups.
constexpr int kRead = 3;  // of all that multiply
constexpr int kSent = 4;  // of these, and the warp that tells

// The same by vectors. tell_all() is what follows them.
template <typename Config>
__device__ __forceinline__ bool reduce_vectors(const FusedReduceParams& p, uint32_t epoch,
                                               bool may_send, const Outputs<Config>& outputs,
                                               const float (&own)[Config::kOwnSums]) {
  using P = Part<Config>;
  using Out = typename Config::Out;
  const ChannelWords& words = p.operation.words;
  const int vectors = (outputs.rows() + 15) / 16;
  uint32_t mine[P::kWords];
#pragma unroll
  for (int w = 0; w < P::kWords; ++w) mine[w] = sm90::pack(Out{}, own[2 * w], own[2 * w + 1]);
  for (int i = 1; i < words.size && may_send; ++i) {
    const int peer = (words.rank + i) % words.size;
    char* const to = slot_of<Config>(p, epoch, peer, words.rank) + threadIdx.x * 16;
#pragma unroll
    for (int j = 0; j < P::kVectors; ++j) {
      if (j >= vectors) break;
      *reinterpret_cast<uint4*>(to + j * P::kStep) = {mine[4 * j], mine[4 * j + 1], mine[4 * j + 2],
                                                      mine[4 * j + 3]};
    }
  }
  sm90::tell_threads(kSent, Config::kMultipliers + 32);
  bool is_good = may_send;
  if (is_peer(words)) {
    const auto peer = static_cast<int>(threadIdx.x);
    is_good = is_told(p, p.told[peer] + blockIdx.x, epoch, peer) && is_good;
  }
  __syncwarp();
  sm90::meet_threads(kRead, Config::kMultipliers);
  put_sums(words, outputs, mine, [&](int source, uint32_t (&part)[P::kWords]) {
    const char* const from = slot_of<Config>(p, epoch, words.rank, source) + threadIdx.x * 16;
#pragma unroll
    for (int j = 0; j < P::kVectors; ++j) {
      if (j >= vectors) break;
      // Written by others: not by way of L1.
      const uint4 vector = __ldcg(reinterpret_cast<const uint4*>(from + j * P::kStep));
      part[4 * j] = vector.x;
      part[4 * j + 1] = vector.y;
      part[4 * j + 2] = vector.z;
      part[4 * j + 3] = vector.w;
    }
  });
  return is_good;
}

// Of one warp: when all threads have sent their vectors, each lane tells a rank, behind a fence
// that the threads do not wait for. Not if some may not have sent, which is false.
template <typename Config>
__device__ __forceinline__ bool tell_all(const FusedReduceParams& p, uint32_t epoch) {
  sm90::meet_threads(kSent, Config::kMultipliers + 32);
  const int peer = static_cast<int>(threadIdx.x) % 32;
  if (!is_peer(p.operation.words, peer)) return true;
  if (has_failed(p.operation.control)) return false;
  store_release(p.tell[peer] + blockIdx.x, epoch);
  return true;
}

// Of a warp of block 0: the ranks tell each other that they have begun, and with how many rows. No
// other block waits for it, nor does this one but in a cluster, so that a peer may have begun the
// next operation. False: they differ, or a wait has failed. Without calls: beside products of wgmma
// ptxas finds no registers for them.
__device__ __forceinline__ bool meet_ranks(const FusedReduceParams& p, uint32_t epoch) {
  const OperationParams& operation = p.operation;
  const ChannelWords& words = operation.words;
  const WaitControl& control = operation.control;
  const int peer = static_cast<int>(threadIdx.x) % 32;
  if (!is_peer(words, peer)) return true;
  if (!has_failed(control)) tell_entry(p.begin[peer], operation.rows, epoch);
  const BegunEntry entry = await_word(words, p.begun[peer] + entry_at(epoch), epoch,
                                      WaitKind::begin, peer, control, kManyLookAtHostNs);
  if (!reached(entry, epoch)) return false;
  if (said_of(entry) == operation.rows) return true;
  WaitRecord what{};
  what.kind = WaitKind::rows;
  what.window = words.id;
  what.peer = peer;
  what.expected = operation.rows;
  give_up(control, what, said_of(entry));
  return false;
}

// Of another warp, which waits for no rank.
__device__ __forceinline__ bool stands_alone(const FusedReduceParams& p) {
  const OperationParams& operation = p.operation;
  if (threadIdx.x % 32 != 0 || atomicExch(operation.busy, 1U) == 0) return true;
  WaitRecord what{};
  what.kind = WaitKind::apart;
  what.window = operation.words.id;
  give_up(operation.control, what, 0);
  return false;
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fused_reduce_kernel(__grid_constant__ const FusedReduceParams p) {
  extern __shared__ char dynamic[];
  __shared__ sm90::SharedBarriers<Config> barriers;
  const uint32_t shared = (sm90::shared_address(dynamic) + 1023) & ~uint32_t{1023};
  const OperationParams& operation = p.operation;
  const ChannelWords& words = operation.words;
  const sm90::FewRowsPlace<Config> place(p.product);
  sm90::init_few_rows(barriers);
  bool is_good = true;
  if (threadIdx.x >= Config::kMultipliers) {
    if constexpr (Config::kGroups > 1) sm90::fewer_registers<40>();
    const int warp = (static_cast<int>(threadIdx.x) - Config::kMultipliers) / 32;
    const uint32_t epoch = *static_cast<const volatile uint32_t*>(words.epoch) + 1;
    if (warp == 1 && blockIdx.x == 0) is_good = meet_ranks(p, epoch);
    if (warp == 2 && blockIdx.x == 0) is_good = stands_alone(p);
    if (threadIdx.x == Config::kMultipliers) {
      sm90::load_few_rows<Config>(p.product, place, shared, barriers);
    }
    __syncwarp();
    if constexpr (Config::kSplit > 1) {
      sm90::cluster_sync();
      sm90::cluster_sync();
    }
    if (warp == 0 && !(Part<Config>::kHasLines && p.by_lines)) {
      is_good = tell_all<Config>(p, epoch);
    }
  } else {
    if constexpr (Config::kGroups > 1) sm90::more_registers<232>();
    // Asked for now, and there when the sums are.
    const uint32_t epoch = *static_cast<const volatile uint32_t*>(words.epoch) + 1;
    const bool may_send = __all_sync(~0U, !has_failed(operation.control)) != 0;
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
      sm90::meet_threads(kRead, Config::kMultipliers);  // all stages have been read
    }
    const Outputs<Config> outputs(p, place, shared);
    if constexpr (Config::In::kBytes == 1) {
      scale<Config>(p, outputs.feature(), outputs.row(), own);
    }
    if (Part<Config>::kHasLines && p.by_lines) {
      if constexpr (Part<Config>::kHasLines) {
        is_good = reduce_lines<Config>(p, epoch, may_send, outputs, own);
      }
    } else {
      is_good = reduce_vectors<Config>(p, epoch, may_send, outputs, own);
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
    return {.kernel = reinterpret_cast<const void*>(fused_reduce_kernel<Config>),
            .rows = kRows,
            .features = Config::kFeatures,
            .cluster = kSplit,
            .depth = Config::kDepth,
            .threads = Config::kThreads,
            .shared_bytes = Config::kSharedBytes,
            .line_bytes = Part<Config>::kHasLines ? Part<Config>::kLines * Part<Config>::kStep : 0,
            .vector_bytes = Part<Config>::kVectors * Part<Config>::kStep};
  }
};

template <typename In, typename Out, bool kWeightAlongK, typename... Shapes>
std::span<const FusedReduceKernel> kernels_of() {
  static const FusedReduceKernel all[] = {Shapes::template kernel<In, Out, kWeightAlongK>()...};
  return all;
}

}  // namespace

std::span<const FusedReduceKernel> fused_reduce_kernels(const sm90::KernelKey& key) {
  // The instruction has the weight first.
  sm90::KernelKey turned = key;
  std::swap(turned.lhs, turned.rhs);
  return sm90::for_types(
      turned, [](auto in, auto out, auto along_k) -> std::span<const FusedReduceKernel> {
        return kernels_of<decltype(in), decltype(out), along_k(), Shape<16, 1, 1>, Shape<32, 1, 1>,
                          Shape<64, 1, 1>, Shape<128, 1, 1>, Shape<256, 1, 2>, Shape<256, 2, 2>>();
      });
}

cudaError_t launch_fused_reduce(const FusedReduceKernel& kernel, const FusedReduceParams& params,
                                int blocks, cudaStream_t stream) {
  return sm90::launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::cuda
