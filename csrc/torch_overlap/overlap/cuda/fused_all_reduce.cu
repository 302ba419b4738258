#include "torch_overlap/overlap/cuda/fused_all_reduce.h"

#include <utility>

#include "torch_overlap/gemm/sm90/small_m.cuh"
#include "torch_overlap/overlap/cuda/operation.cuh"
#include "torch_overlap/symm/cuda/ll_packet_device.h"

// GEMM + all-reduce of few rows in one kernel. A block computes a tile of features for all rows,
// sends its sums from registers directly to the blocks of the same index on the other ranks, and
// adds their sums to its own. A thread holds the same rows and features on all ranks, so the data
// needs no order other than that of the threads.
//
//   rank 0, block b                               rank 1, block b
//   weight, rows -> sums                          weight, rows -> sums
//   rounded sums ------------------------------>  slots[e % 2][0][b]
//   slots[e % 2][1][b]  <-----------------------  rounded sums
//   wait for all; total in rank order, times factor, plus bias
//   rounded, transposed in shared memory, stored
//
// LL: each packet of 16 bytes carries the epoch, which shows that it has arrived. Simple: one flag
// per block, after a barrier and a fence. Simple is used if the message is large enough that LL's
// additional third of bytes takes longer than the barrier, fence and flag.
//
// Nothing is overwritten before it is read. The slots of operation e are those of e - 2, and share
// no memory with those of e - 1, whatever the sizes of the operations. A rank that writes them has
// received, by the end of its kernel of e - 1, data of operation e - 1 from every rank, and that
// rank sent this data after the end of its kernel of e - 2, in which it had read its slots.
// Therefore there is no entry barrier and no exit barrier.
//
// There is no circular wait. A block waits only for the blocks of its own index on other ranks, and
// these wait for it. If not all blocks have an SM, GPUs start them in index order, although CUDA
// does not guarantee it.
namespace torch_overlap::cuda {
namespace {

// One thread's part of a tile, rounded. Each word holds two adjacent rows of a feature; four words
// cover 16 rows of the tile.
template <typename Config>
struct Part {
  static constexpr int kWords = Config::kLocalRows / 4;
  static constexpr int kNumLLPackets = (kWords + 2) / 3;
  static constexpr bool kSupportsLL = kWords <= 16;  // Keeps all packets in registers at once.
  static constexpr int kVectors = kWords / 4;
  // Stride in bytes between successive packets or vectors of a thread.
  static constexpr int kStep = Config::kNumMmaThreads * 16;
  // Outputs are staged in shared memory after the sums of the cluster's other block. Both reuse the
  // memory of the stages.
  static_assert(Config::kExchangeBytes + Config::kLocalRows * Config::kFeatures * 2 <=
                Config::kStages * Config::kStageBytes);
};

// Exchanges the sums of a tile between two blocks, each of which has summed half of k. Each block
// gets the sums of half of the rows, which add_half() adds to its own. A thread has the same rows
// and features in both blocks. All threads of both blocks must synchronize before and after this.
template <typename Config>
__device__ __forceinline__ void give_half(const sm90::SmallMTile<Config>& place, uint32_t shared,
                                          const float (&sums)[Config::kAccumulators],
                                          float (&own)[Config::kNumLocalAccumulators]) {
  const auto other = static_cast<uint32_t>(1 - place.part);
  const bool is_first = place.part == 0;
#pragma unroll
  for (int i = 0; i < Config::kNumLocalAccumulators; i += 4) {
    float give[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float low = sums[i + j];
      const float high = sums[Config::kNumLocalAccumulators + i + j];
      own[i + j] = is_first ? low : high;
      give[j] = is_first ? high : low;
    }
    sm90::st_shared_cluster(shared + (i / 4 * Config::kNumMmaThreads + threadIdx.x) * 16, other,
                            {give[0], give[1], give[2], give[3]});
  }
}

template <typename Config>
__device__ __forceinline__ void add_half(uint32_t shared,
                                         float (&own)[Config::kNumLocalAccumulators]) {
#pragma unroll
  for (int i = 0; i < Config::kNumLocalAccumulators; i += 4) {
    const uint4 given =
        sm90::load_vector(shared + (i / 4 * Config::kNumMmaThreads + threadIdx.x) * 16);
    own[i] += __uint_as_float(given.x);
    own[i + 1] += __uint_as_float(given.y);
    own[i + 2] += __uint_as_float(given.z);
    own[i + 3] += __uint_as_float(given.w);
  }
}

// Returns the slot on `owner` that the block of `source` with this block's index writes in an
// operation.
template <typename Config>
__device__ __forceinline__ char* slot_of(const FusedAllReduceParams& p, uint32_t epoch, int owner,
                                         int source) {
  using P = Part<Config>;
  const int bytes = (p.use_ll ? P::kNumLLPackets : P::kVectors) * P::kStep;
  const int64_t block = static_cast<int64_t>(source) * gridDim.x + blockIdx.x;
  return p.slots[owner] + (epoch % 2 == 0 ? 0 : p.odd_epoch_offset) + block * bytes;
}

// Applies the scales of 8-bit operands to the sums [features, rows].
template <typename Config>
__device__ __forceinline__ void scale(const FusedAllReduceParams& p, int feature, int row,
                                      float (&sums)[Config::kNumLocalAccumulators]) {
  if (!p.scaled_by_row) {
    sm90::multiply_by(*p.rows_scale * *p.weight_scale, sums);
    return;
  }
  const float first = feature < p.product.n ? p.weight_scale[feature] : 0.0F;
  const float second = feature + 8 < p.product.n ? p.weight_scale[feature + 8] : 0.0F;
#pragma unroll
  for (int i = 0; i < Config::kNumLocalAccumulators; i += 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int at = row + 2 * i + j;
      const float factor = at < p.product.m ? p.rows_scale[at] : 0.0F;
      sums[i + j] *= first * factor;
      sums[i + 2 + j] *= second * factor;
    }
  }
}

// Rounds and stores the sums of a warpgroup's 64 features.
template <typename Config>
class Outputs {
  using Out = typename Config::Out;

 public:
  __device__ __forceinline__ Outputs(const FusedAllReduceParams& p,
                                     const sm90::SmallMTile<Config>& place, uint32_t shared)
      : p_(p),
        group_(static_cast<int>(threadIdx.x) / 128),
        first_feature_(place.feature + 64 * group_),
        first_row_(place.part * Config::kLocalRows),
        shared_(shared + Config::kExchangeBytes + group_ * Config::kLocalRows * 128) {
    if (p.bias == nullptr) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = feature() + 8 * half;
      if (at < p.product.n) bias_[half] = sm90::widen(static_cast<const Out*>(p.bias)[at]);
    }
  }

  // First feature of this thread, whose second one is feature() + 8; and its first row.
  __device__ __forceinline__ int feature() const {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    return first_feature_ + thread / 32 * 16 + thread % 32 / 4;
  }
  __device__ __forceinline__ int row() const {
    return first_row_ + 2 * (static_cast<int>(threadIdx.x) % 4);
  }
  // Number of this block's rows that the product has.
  __device__ __forceinline__ int rows() const {
    return max(0, min(Config::kLocalRows, p_.product.m - first_row_));
  }

  // Applies the factor and the bias, rounds, and stores to `out`.
  __device__ __forceinline__ void store(const float (&total)[Config::kNumLocalAccumulators]) const {
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
      sm90::stmatrix_x4_trans(shared_ + row * 128 + ((chunk ^ (row & 7)) << 4), rounded);
    }
    sm90::named_barrier_sync(1 + group_, 128);
    const int vector = thread % 8;
    const int feature = first_feature_ + vector * 8;
    if (feature >= p_.product.n) return;
    auto* const out = static_cast<Out*>(p_.out) + feature;
#pragma unroll 4
    for (int row = thread / 8; row < Config::kLocalRows; row += 16) {
      if (first_row_ + row >= p_.product.m) break;
      *reinterpret_cast<uint4*>(out + static_cast<int64_t>(first_row_ + row) * p_.product.n) =
          sm90::load_vector(shared_ + row * 128 + ((vector ^ (row & 7)) << 4));
    }
  }

 private:
  const FusedAllReduceParams& p_;
  const int group_;
  const int first_feature_;
  const int first_row_;
  const uint32_t shared_;
  float bias_[2] = {0, 0};
};

// Adds the words of one rank to `total`. Rank 0 must come first: it initializes `total`.
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

// Sums the data of all ranks in rank order and stores the result. `mine` is this rank's data;
// take(rank, part) reads the data of another rank into `part`.
template <typename Config, int kWords, typename Take>
__device__ __forceinline__ void store_sums(const ChannelWords& words,
                                           const Outputs<Config>& outputs,
                                           const uint32_t (&mine)[kWords], const Take& take) {
  using Out = typename Config::Out;
  float total[Config::kNumLocalAccumulators];
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
  outputs.store(total);
}

// True if data with the epoch `seen` belongs to this operation, or to one that is at most `ahead`
// later, which its sender may have reached. False for a word that no operation has written for a
// long time.
__device__ __forceinline__ bool is_in_epoch_window(uint32_t seen, uint32_t epoch, uint32_t ahead) {
  return seen - epoch <= ahead;
}

// Slow path: waits for a word of `source` that has been polled for a while. Returns false if a wait
// has failed.
__device__ __noinline__ bool wait_late_packet(const FusedAllReduceParams& p, const uint32_t* word,
                                              uint32_t epoch, uint32_t ahead, int source) {
  const OperationParams& operation = p.operation;
  const uint32_t* const abort_flag = operation.words.abort_flag;
  uint32_t seen;
  const WaitResult end = poll_until(
      operation.control, word,
      [=](uint32_t now) {
        return is_in_epoch_window(now, epoch, ahead) || load_acquire(abort_flag) != 0;
      },
      kAllBlocksHostPollIntervalNs, seen);
  if (end == WaitResult::failed) return false;
  if (end == WaitResult::ready && is_in_epoch_window(load_acquire(word), epoch, ahead)) {
    return !has_failed(operation.control);
  }
  const EntryFlag* const entry = p.entry_flags[source] + entry_slot(epoch);
  const EntryFlag begun = load_acquire(entry);
  WaitRecord what{};
  what.kind = WaitKind::chunk;
  if (end == WaitResult::ready) {
    what.kind = WaitKind::peer_aborted;
  } else if (!has_entered(begun, epoch)) {  // Only the first block waits for entry flags.
    what.kind = WaitKind::begin;
    seen = arrived_epoch(entry, begun, epoch);
  }
  what.memory_id = operation.words.id;
  what.peer = source;
  what.expected = epoch;
  record_failure(operation.control, what, seen);
  return false;
}

constexpr int kPollsPerCheck = 64;  // Number of polls before the slow path.

// Waits for the flag of a source, which follows its Simple data. The flag may already have the
// epoch of the next operation. Returns false if a wait has failed.
__device__ __forceinline__ bool wait_block_flag(const FusedAllReduceParams& p, const uint32_t* word,
                                                uint32_t epoch, int source) {
#pragma unroll 1
  for (int look = 0; look < kPollsPerCheck; ++look) {
    if (is_in_epoch_window(load_acquire(word), epoch, 1)) return true;
  }
  return wait_late_packet(p, word, epoch, 1, source);
}

// Waits for each LL packet of this thread by its epoch. The source does not overwrite a packet
// before it has received this rank's data of the next operation.
template <typename Config>
__device__ __forceinline__ bool wait_ll_packets(const FusedAllReduceParams& p, const char* from,
                                                int packets, uint32_t epoch, int source) {
#pragma unroll 1
  for (int j = 0; j < packets; ++j) {
    const auto* const word = reinterpret_cast<const uint32_t*>(from + j * Part<Config>::kStep) + 3;
    if (!wait_late_packet(p, word, epoch, 0, source)) return false;
  }
  return true;
}

// Sends this thread's data to all peers and receives theirs. Returns false if a wait has failed.
template <typename Config>
__device__ __forceinline__ bool reduce_ll(const FusedAllReduceParams& p, uint32_t epoch,
                                          bool may_send, const Outputs<Config>& outputs,
                                          const float (&own)[Config::kNumLocalAccumulators]) {
  using P = Part<Config>;
  using Out = typename Config::Out;
  const ChannelWords& words = p.operation.words;
  const int packets = ((outputs.rows() + 7) / 8 * 2 + 2) / 3;
  uint32_t mine[3 * P::kNumLLPackets] = {};
#pragma unroll
  for (int w = 0; w < P::kWords; ++w) mine[w] = sm90::pack(Out{}, own[2 * w], own[2 * w + 1]);
  for (int i = 1; i < words.size && may_send; ++i) {
    const int peer = (words.rank + i) % words.size;
    char* const to = slot_of<Config>(p, epoch, peer, words.rank) + threadIdx.x * 16;
#pragma unroll
    for (int j = 0; j < P::kNumLLPackets; ++j) {
      if (j >= packets) break;
      store_ll(to + j * P::kStep, {mine[3 * j], mine[3 * j + 1], mine[3 * j + 2], epoch});
    }
  }
  bool is_good = may_send;
  const auto take = [&](int source, uint32_t (&part)[3 * P::kNumLLPackets]) {
    const char* const from = slot_of<Config>(p, epoch, words.rank, source) + threadIdx.x * 16;
    for (int look = 1;; ++look) {
      bool is_ready = true;
#pragma unroll
      for (int j = 0; j < P::kNumLLPackets; ++j) {
        if (j >= packets) break;
        const uint4 line = load_ll(from + j * P::kStep);
        is_ready = is_ready && is_in_epoch_window(line.w, epoch, 0);
        part[3 * j] = line.x;
        part[3 * j + 1] = line.y;
        part[3 * j + 2] = line.z;
      }
      if (is_ready) return true;
      if (look % kPollsPerCheck == 0 && !wait_ll_packets<Config>(p, from, packets, epoch, source))
        return false;
    }
  };
  store_sums(words, outputs, mine, [&](int source, uint32_t (&part)[3 * P::kNumLLPackets]) {
    is_good = is_good && take(source, part);
  });
  return is_good;
}

// Named barriers of the block. 1 and 2 are those of the warpgroups.
constexpr int kRead = 3;  // All threads that multiply.
constexpr int kSent = 4;  // These, and the warp that signals the peers.

// Does the same by Simple. signal_peers() sends the flags that follow the data.
template <typename Config>
__device__ __forceinline__ bool reduce_simple(const FusedAllReduceParams& p, uint32_t epoch,
                                              bool may_send, const Outputs<Config>& outputs,
                                              const float (&own)[Config::kNumLocalAccumulators]) {
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
  sm90::named_barrier_arrive(kSent, Config::kNumMmaThreads + 32);
  bool is_good = may_send;
  if (is_peer(words)) {
    const auto peer = static_cast<int>(threadIdx.x);
    is_good = wait_block_flag(p, p.notified[peer] + blockIdx.x, epoch, peer) && is_good;
  }
  __syncwarp();
  sm90::named_barrier_sync(kRead, Config::kNumMmaThreads);
  store_sums(words, outputs, mine, [&](int source, uint32_t (&part)[P::kWords]) {
    const char* const from = slot_of<Config>(p, epoch, words.rank, source) + threadIdx.x * 16;
#pragma unroll
    for (int j = 0; j < P::kVectors; ++j) {
      if (j >= vectors) break;
      // Bypasses L1: other ranks write this memory.
      const uint4 vector = __ldcg(reinterpret_cast<const uint4*>(from + j * P::kStep));
      part[4 * j] = vector.x;
      part[4 * j + 1] = vector.y;
      part[4 * j + 2] = vector.z;
      part[4 * j + 3] = vector.w;
    }
  });
  return is_good;
}

// Called by one warp. After all threads have sent their vectors, each lane signals one rank. The
// release store includes the fence, so the sending threads do not wait for it. Returns false,
// without a signal, if some threads may not have sent.
template <typename Config>
__device__ __forceinline__ bool signal_peers(const FusedAllReduceParams& p, uint32_t epoch) {
  sm90::named_barrier_sync(kSent, Config::kNumMmaThreads + 32);
  const int peer = static_cast<int>(threadIdx.x) % 32;
  if (!is_peer(p.operation.words, peer)) return true;
  if (has_failed(p.operation.control)) return false;
  store_release(p.peer_flags[peer] + blockIdx.x, epoch);
  return true;
}

// Called by a warp of block 0. Exchanges entry flags, with the rows and the signature, with all
// peers. Only the cluster of block 0 waits for the exchange before it sends, and only if kSplitK >
// 1; therefore a peer may have begun the next operation already. Returns false if the signatures
// differ or a wait has failed. Contains no calls: ptxas finds no registers for them next to wgmma.
__device__ __forceinline__ bool exchange_entry_flags(const FusedAllReduceParams& p,
                                                     uint32_t epoch) {
  const OperationParams& operation = p.operation;
  const ChannelWords& words = operation.words;
  const WaitControl& control = operation.control;
  const int peer = static_cast<int>(threadIdx.x) % 32;
  if (!is_peer(words, peer)) return true;
  if (!has_failed(control)) signal_entry(p.begin[peer], operation.payload, epoch);
  const EntryFlag entry = await_word(words, p.entry_flags[peer] + entry_slot(epoch), epoch,
                                     WaitKind::begin, peer, control, kAllBlocksHostPollIntervalNs);
  if (!has_entered(entry, epoch)) return false;
  if (payload_of(entry) == operation.payload) return true;
  WaitRecord what{};
  what.kind = WaitKind::signature_mismatch;
  what.memory_id = words.id;
  what.peer = peer;
  what.expected = operation.payload;
  record_failure(control, what, payload_of(entry));
  return false;
}

// Called by another warp, which waits for no rank. Returns false if another such kernel runs.
__device__ __forceinline__ bool try_mark_busy(const FusedAllReduceParams& p) {
  const OperationParams& operation = p.operation;
  if (threadIdx.x % 32 != 0 || atomicExch(operation.busy, 1U) == 0) return true;
  WaitRecord what{};
  what.kind = WaitKind::concurrent_ops;
  what.memory_id = operation.words.id;
  record_failure(operation.control, what, 0);
  return false;
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fused_all_reduce_kernel(__grid_constant__ const FusedAllReduceParams p) {
  extern __shared__ char dynamic[];
  __shared__ sm90::SharedBarriers<Config> barriers;
  const uint32_t shared = (sm90::shared_address(dynamic) + 1023) & ~uint32_t{1023};
  const OperationParams& operation = p.operation;
  const ChannelWords& words = operation.words;
  const sm90::SmallMTile<Config> place(p.product);
  sm90::init_small_m(barriers);
  bool is_good = true;
  if (threadIdx.x >= Config::kNumMmaThreads) {
    if constexpr (Config::kNumMmaWarpgroups > 1) sm90::warpgroup_reg_dealloc<40>();
    const int warp = (static_cast<int>(threadIdx.x) - Config::kNumMmaThreads) / 32;
    const uint32_t epoch = *static_cast<const volatile uint32_t*>(words.epoch) + 1;
    if (warp == 1 && blockIdx.x == 0) is_good = exchange_entry_flags(p, epoch);
    if (warp == 2 && blockIdx.x == 0) is_good = try_mark_busy(p);
    if (threadIdx.x == Config::kNumMmaThreads) {
      sm90::load_small_m<Config>(p.product, place, shared, barriers);
    }
    __syncwarp();
    if constexpr (Config::kSplitK > 1) {
      sm90::cluster_sync();
      sm90::cluster_sync();
    }
    if (warp == 0 && !(Part<Config>::kSupportsLL && p.use_ll)) {
      is_good = signal_peers<Config>(p, epoch);
    }
  } else {
    if constexpr (Config::kNumMmaWarpgroups > 1) sm90::warpgroup_reg_alloc<232>();
    // Loaded early, so that the latency overlaps with the product.
    const uint32_t epoch = *static_cast<const volatile uint32_t*>(words.epoch) + 1;
    const bool may_send = __all_sync(~0U, !has_failed(operation.control)) != 0;
    float sums[Config::kAccumulators];
    sm90::PipelineState<Config::kStages> at;
    sm90::multiply_small_m<Config>(place, shared, barriers, at, sums);
    float own[Config::kNumLocalAccumulators];
    if constexpr (Config::kSplitK > 1) {
      sm90::cluster_sync();  // All stages have been read.
      give_half<Config>(place, shared, sums, own);
      sm90::cluster_sync();
      add_half<Config>(shared, own);
    } else {
#pragma unroll
      for (int i = 0; i < Config::kNumLocalAccumulators; ++i) own[i] = sums[i];
      sm90::named_barrier_sync(kRead, Config::kNumMmaThreads);  // All stages have been read.
    }
    const Outputs<Config> outputs(p, place, shared);
    if constexpr (Config::In::kBytes == 1) {
      scale<Config>(p, outputs.feature(), outputs.row(), own);
    }
    if (Part<Config>::kSupportsLL && p.use_ll) {
      if constexpr (Part<Config>::kSupportsLL) {
        is_good = reduce_ll<Config>(p, epoch, may_send, outputs, own);
      }
    } else {
      is_good = reduce_simple<Config>(p, epoch, may_send, outputs, own);
    }
  }
  is_good = __syncthreads_and(static_cast<int>(is_good)) != 0;
  if (!is_good && is_peer(words)) signal_abort(operation, static_cast<int>(threadIdx.x));
  if (threadIdx.x == 0) {
    const uint32_t epoch = *static_cast<const volatile uint32_t*>(words.epoch) + 1;
    if (atomicAdd(words.ticket, 1U) + 1 == gridDim.x) leave_operation(operation, epoch, is_good);
  }
}

// Part of a configuration that does not depend on types and layouts.
template <int kRows, int kNumMmaWarpgroups, int kSplitK>
struct Shape {
  template <typename In, typename Out, bool kIsWeightKMajor>
  static FusedAllReduceKernel kernel() {
    using Config = sm90::SmallMConfig<In, Out, kRows, kNumMmaWarpgroups, kSplitK, kIsWeightKMajor>;
    return {.kernel = reinterpret_cast<const void*>(fused_all_reduce_kernel<Config>),
            .rows = kRows,
            .features = Config::kFeatures,
            .cluster = kSplitK,
            .depth = Config::kDepth,
            .threads = Config::kThreads,
            .shared_bytes = Config::kSharedBytes,
            .ll_bytes =
                Part<Config>::kSupportsLL ? Part<Config>::kNumLLPackets * Part<Config>::kStep : 0,
            .simple_bytes = Part<Config>::kVectors * Part<Config>::kStep};
  }
};

template <typename In, typename Out, bool kIsWeightKMajor, typename... Shapes>
std::span<const FusedAllReduceKernel> kernels_of() {
  static const FusedAllReduceKernel all[] = {
      Shapes::template kernel<In, Out, kIsWeightKMajor>()...};
  return all;
}

}  // namespace

std::span<const FusedAllReduceKernel> fused_all_reduce_kernels(const sm90::KernelKey& key) {
  // The weight is the first operand of the instruction.
  sm90::KernelKey turned = key;
  std::swap(turned.lhs, turned.rhs);
  return sm90::dispatch_types(
      turned, [](auto in, auto out, auto is_k_major) -> std::span<const FusedAllReduceKernel> {
        return kernels_of<decltype(in), decltype(out), is_k_major(), Shape<16, 1, 1>,
                          Shape<32, 1, 1>, Shape<64, 1, 1>, Shape<128, 1, 1>, Shape<256, 1, 2>,
                          Shape<256, 2, 2>>();
      });
}

cudaError_t launch_fused_all_reduce(const FusedAllReduceKernel& kernel,
                                    const FusedAllReduceParams& params, int blocks,
                                    cudaStream_t stream) {
  return sm90::launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::cuda
