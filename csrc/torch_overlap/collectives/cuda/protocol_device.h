#pragma once

#include <cstdint>

#include "torch_overlap/collectives/cuda/kernels.h"
#include "torch_overlap/collectives/cuda/words_device.h"
#include "torch_overlap/common/cuda/dependent_launch_device.h"
#include "torch_overlap/symm/cuda/wait_device.h"

// Common code of the custom collective kernels. For .cu files.
namespace torch_overlap::cuda {

using G = CollectiveGeometry;

inline constexpr int kWarp = 32;
static_assert(G::kMaxRanks <= kWarp);
// Minimum number of blocks per SM. A kernel that is launched before the preceding one has ended
// occupies SMs that another communicator's kernel may need. Both fit if each uses half of all SMs.
template <typename Case>
inline constexpr int kMinBlocksPerSm = Case::kMaxRanks == 2 ? 4 : 2;

// The host's watchdog reports late operations. The device reports them this much later, for graph
// replays, which the host does not watch.
inline constexpr uint64_t kGraceNs = 1'000'000'000;

// --- A block's part of an operation --------------------------------------------------------------

// Progress of a block with each of its peers. In shared memory.
struct BlockState {
  uint32_t epoch[G::kMaxRanks];  // rounds completed before this kernel
  bool is_busy;                  // Entry::is_busy
};

__device__ __forceinline__ uint32_t* word_at(const CollectiveParams& p, size_t offset) {
  return reinterpret_cast<uint32_t*>(p.base[p.rank] + offset);
}

__device__ __forceinline__ uint32_t* epoch_of(const CollectiveParams& p, int peer) {
  return word_at(p, CollectiveLayout::kEpochs) + blockIdx.x * G::kMaxRanks + peer;
}

// Returns the number of rounds of this block with `peer`. Its chunks are block, block + grid,
// block + 2 grid, ...
__device__ __forceinline__ uint32_t rounds_with(const CollectiveParams& p, int peer) {
  const uint32_t chunks = p.chunks[peer];
  return chunks > blockIdx.x ? (chunks - blockIdx.x - 1) / gridDim.x + 1 : 0;
}

__device__ __forceinline__ void begin_kernel(const CollectiveParams& p) {
  wait_for_kernel_before();
  let_next_kernel_launch();
}

// Result of entering a block on thread 0; both are 0 on all other threads. Nothing may be sent if
// either is set.
struct Entry {
  uint32_t is_busy;     // another kernel of the channel uses the block, and releases it
  uint32_t has_failed;  // an earlier wait has failed: the data may be wrong
};

// Marks the block as busy. Issues both requests together and without a branch, so that nothing
// waits before the results are used.
__device__ __forceinline__ Entry enter_block(const CollectiveParams& p) {
  Entry entry;
  asm volatile(
      "{\n"
      ".reg .pred first;\n"
      "setp.eq.u32 first, %4, 0;\n"
      "mov.u32 %0, 0;\n"
      "mov.u32 %1, 0;\n"
      "@first atom.relaxed.gpu.global.exch.b32 %0, [%2], 1;\n"
      "@first ld.relaxed.gpu.global.u32 %1, [%3];\n"
      "}"
      : "=&r"(entry.is_busy), "=&r"(entry.has_failed)
      : "l"(word_at(p, CollectiveLayout::kBusy) + blockIdx.x), "l"(p.control.failed),
        "r"(threadIdx.x)
      : "memory");
  return entry;
}

// Returns true if the block may send: the same on all threads, which synchronize here.
__device__ __forceinline__ bool try_enter(const CollectiveParams& p, const Entry& entry) {
  const bool is_good = __syncthreads_or(static_cast<int>(entry.is_busy | entry.has_failed)) == 0;
  if (entry.is_busy != 0) {
    WaitRecord what{};
    what.kind = WaitKind::concurrent_ops;
    what.memory_id = p.memory_id;
    record_failure(p.control, what, 0);
  }
  return is_good;
}

// Called by the first warp of a block, after its epochs are written.
__device__ __forceinline__ void leave_block(const CollectiveParams& p, bool is_busy) {
  __syncwarp();
  if (threadIdx.x != 0) return;
  if (!is_busy) word_at(p, CollectiveLayout::kBusy)[blockIdx.x] = 0;
  if (blockIdx.x == 0) *word_at(p, CollectiveLayout::kLateReported) = 0;
}

// Returns false if nothing may be sent.
__device__ __forceinline__ bool enter_block(const CollectiveParams& p, BlockState& state) {
  const auto thread = static_cast<int>(threadIdx.x);
  const Entry entry = enter_block(p);
  if (thread < p.size) state.epoch[thread] = *static_cast<volatile uint32_t*>(epoch_of(p, thread));
  if (thread == 0) state.is_busy = entry.is_busy != 0;
  return try_enter(p, entry);
}

__device__ __forceinline__ bool begin_block(const CollectiveParams& p, BlockState& state) {
  begin_kernel(p);
  return enter_block(p, state);
}

// `has_rounds`: adds the rounds with each peer. All other rounds are already counted in `state`.
__device__ __forceinline__ void end_block(const CollectiveParams& p, const BlockState& state,
                                          bool has_rounds = true) {
  __syncthreads();
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < p.size && thread != p.rank) {
    *epoch_of(p, thread) = state.epoch[thread] + (has_rounds ? rounds_with(p, thread) : 0);
  }
  if (thread < kWarp) leave_block(p, state.is_busy);
}

// --- Waiting -------------------------------------------------------------------------------------

// Reports a late rank for the watchdog's message. If a rank is missing, block 0 waits for it too,
// so only block 0 reports.
__device__ __forceinline__ void report_late(const CollectiveParams& p, int peer, uint32_t expected,
                                            uint32_t seen) {
  if (blockIdx.x != 0) return;
  if (atomicExch(word_at(p, CollectiveLayout::kLateReported), 1) != 0) return;
  volatile WaitRecord* record = p.control.record;
  record->late.peer = peer;
  record->late.block = blockIdx.x;
  record->late.expected = expected;
  record->late.seen = seen;
  __threadfence_system();
  record->is_late = 1;
}

// Returns true if the epoch `seen` is that of the awaited round, or of one of the next rounds: the
// peer may be fewer than `slots` rounds ahead. Any other epoch is old.
__device__ __forceinline__ bool is_ready(uint32_t seen, uint32_t expected, uint32_t slots) {
  return seen - expected < slots;
}

// Slow path of a thread that has polled kSpinsBeforeCheck times. Returns true when `word`, which
// only `peer` writes, is ready, without acquire order. Returns false if the results of this kernel
// are not valid any more: the wait expired, was stopped, or another one had failed.
inline constexpr int kSpinsBeforeCheck = 64;

static __device__ __noinline__ bool wait_slow_path(const CollectiveParams& p, const uint32_t* word,
                                                   int peer, uint32_t expected, uint32_t slots) {
  constexpr uint64_t kSpinNs = 200'000;
  // All threads of a kernel may wait here. A few of them poll the host's word often, while they
  // wait themselves: those that wait for rank 0 or 1, or for the rank that a warp's first thread
  // waits for.
  const bool polls_host_often = blockIdx.x == 0 && threadIdx.x % kWarp <= 1;
  const uint64_t look_interval =
      polls_host_often ? kHostPollIntervalNs : kAllBlocksHostPollIntervalNs;
  const uint64_t begin = now_ns();
  uint64_t next_host_poll_ns = begin + look_interval;
  while (true) {
    if (*static_cast<const volatile uint32_t*>(p.control.failed) == kWaitFailed) return false;
    uint32_t seen = load_relaxed(word);
    for (int spins = 1; spins < kSpinsBeforeCheck && !is_ready(seen, expected, slots); ++spins) {
      seen = load_relaxed(word);
    }
    if (is_ready(seen, expected, slots)) return true;
    const uint64_t now = now_ns();
    if (now >= next_host_poll_ns) {
      next_host_poll_ns = now + look_interval;
      if (*static_cast<const volatile uint32_t*>(&p.control.record->stopped) != 0) {
        atomicCAS(p.control.failed, kNoWaitFailed, kWaitFailed);
        return false;
      }
    }
    const uint64_t waited = now - begin;
    if (waited > kSpinNs) __nanosleep(500);
    if (waited < p.control.timeout_ns) continue;
    // The slot of an LL packet still holds an earlier round, although the previous round has
    // arrived.
    if (slots == 1) seen = expected - 1;
    report_late(p, peer, expected, seen);
    if (waited < p.control.timeout_ns + kGraceNs) continue;
    WaitRecord what{};
    what.kind = WaitKind::step;
    what.memory_id = p.memory_id;
    what.peer = peer;
    what.expected = expected;
    what.block = blockIdx.x;
    record_failure(p.control, what, seen);
    return false;
  }
}

// --- Flags and vectors ---------------------------------------------------------------------------

// Returns the flag by which `source` notifies `owner` that its data of a round of this block has
// arrived.
__device__ __forceinline__ uint32_t* flag_of(const CollectiveParams& p, int kind, int owner,
                                             int source) {
  const size_t index = blockIdx.x * G::kMaxRanks + source;
  return reinterpret_cast<uint32_t*>(p.base[owner] + CollectiveLayout::kFlags +
                                     kind * CollectiveLayout::kFlagBytesPerKind +
                                     index * G::kFlagBytes);
}

// Returns the vectors that `source` writes to `owner` in the round with this epoch.
template <typename Case>
__device__ __forceinline__ char* simple_slot_of(const CollectiveParams& p, int owner, int source,
                                                uint32_t epoch) {
  const size_t slot =
      (size_t{blockIdx.x} * G::kSimpleSlots + epoch % G::kSimpleSlots) * size_of<Case>(p);
  return p.base[owner] + p.simple_offset +
         (slot + source) * CollectiveLayout::simple_bytes_per_rank();
}

// --- Slices of a two-shot all_reduce: rank r reduces slice r

struct Slice {
  uint64_t begin;  // offset in bytes in the message
  uint64_t bytes;
};

__device__ __forceinline__ Slice slice_of(const CollectiveParams& p, int rank) {
  const uint64_t all = p.send_bytes[0];
  const uint64_t each = p.slice_bytes;
  const uint64_t begin = min(rank * each, all);
  return {begin, min(each, all - begin)};
}

// --- Ranks relative to this one

// Returns the rank `k` places after this one (rank_before(): before it) in ring order.
template <typename Case>
__device__ __forceinline__ int rank_after(const CollectiveParams& p, int k) {
  return p.rank + k < size_of<Case>(p) ? p.rank + k : p.rank + k - size_of<Case>(p);
}
template <typename Case>
__device__ __forceinline__ int rank_before(const CollectiveParams& p, int k) {
  return p.rank >= k ? p.rank - k : p.rank - k + size_of<Case>(p);
}

// Loads seen[r]: `own` for this rank, the vector at staged(r) for rank r.
template <typename Case, typename Staged>
__device__ __forceinline__ void load_vectors(const CollectiveParams& p, const Words<4>& own,
                                             Words<4> (&seen)[Case::kMaxRanks],
                                             const Staged& staged) {
#pragma unroll
  for (int source = 0; source < Case::kMaxRanks; ++source) {
    if (source >= size_of<Case>(p)) continue;
    seen[source] = own;
    if (source != p.rank) seen[source] = load_staged(staged(source));
  }
}

// Reduces in rank order.
template <typename T, typename Case>
__device__ __forceinline__ Accumulator<Case, T, 4> accumulate(
    const CollectiveParams& p, const Words<4> (&seen)[Case::kMaxRanks]) {
  Accumulator<Case, T, 4> sum;
  sum.start(seen[0]);
#pragma unroll
  for (int source = 1; source < Case::kMaxRanks; ++source) {
    if (source < size_of<Case>(p)) sum.add(p.op, seen[source]);
  }
  return sum;
}

template <typename T, typename Case, typename Staged>
__device__ __forceinline__ Words<4> reduce_vectors(const CollectiveParams& p, const Words<4>& own,
                                                   const Staged& staged) {
  Words<4> seen[Case::kMaxRanks];
  load_vectors<Case>(p, own, seen, staged);
  return accumulate<T, Case>(p, seen).result(p.op, size_of<Case>(p));
}

// Returns true if this thread serves a peer in the round: the peer of the thread's number.
__device__ __forceinline__ bool has_peer_in_round(const CollectiveParams& p, uint32_t round) {
  const auto peer = static_cast<int>(threadIdx.x);
  return peer < p.size && peer != p.rank && round < rounds_with(p, peer);
}

// Notifies the peers, one thread per peer. All threads have stored the data for the peers and have
// synchronized.
__device__ __forceinline__ void raise_flag(const CollectiveParams& p, const BlockState& state,
                                           int kind, uint32_t round) {
  if (!has_peer_in_round(p, round)) return;
  const auto peer = static_cast<int>(threadIdx.x);
  store_release(flag_of(p, kind, peer, p.rank), state.epoch[peer] + 1 + round);
}

// Waits for the peer's flag. Returns true if the wait failed.
__device__ __forceinline__ bool await_flag(const CollectiveParams& p, int kind, int peer,
                                           uint32_t expected) {
  const uint32_t* const flag = flag_of(p, kind, p.rank, peer);
  constexpr uint32_t kSlots = G::kSimpleSlots;
  for (int spins = 1; !is_ready(load_acquire(flag), expected, kSlots); ++spins) {
    if (spins % kSpinsBeforeCheck == 0 && !wait_slow_path(p, flag, peer, expected, kSlots))
      return true;
  }
  return false;
}

// Waits for the flags of all peers that take part in the round, and synchronizes all threads.
// Returns false, on all threads, if a wait failed.
__device__ __forceinline__ bool await_flags(const CollectiveParams& p, const BlockState& state,
                                            int kind, uint32_t round) {
  const auto peer = static_cast<int>(threadIdx.x);
  const bool failed =
      has_peer_in_round(p, round) && await_flag(p, kind, peer, state.epoch[peer] + 1 + round);
  return __syncthreads_or(failed) == 0;
}

// --- Launching -----------------------------------------------------------------------------------

template <typename Kernel, typename... Params>
cudaError_t launch_kernel(Kernel kernel, const LaunchConfig& launch, const Params&... params) {
  cudaLaunchAttribute attributes[2] = {};
  unsigned int count = 0;
  if (launch.dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {launch.cluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(launch.blocks);
  config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = launch.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

inline constexpr ReductionType kReductionTypes[] = {ReductionType::i32, ReductionType::i64,
                                                    ReductionType::f16, ReductionType::bf16,
                                                    ReductionType::f32, ReductionType::f64};
template <typename T>
inline constexpr bool kHasFastPath =
    std::is_same_v<T, float> || std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

// Calls `act(T{})` with the element type.
template <typename Act>
cudaError_t for_type(ReductionType type, const Act& act) {
  switch (type) {
    case ReductionType::i32:
      return act(int32_t{});
    case ReductionType::i64:
      return act(int64_t{});
    case ReductionType::f16:
      return act(__half{});
    case ReductionType::bf16:
      return act(__nv_bfloat16{});
    case ReductionType::f32:
      return act(float{});
    case ReductionType::f64:
      return act(double{});
  }
  return cudaErrorInvalidValue;
}

// Returns true if every address and every size is a multiple of `unit` bytes.
inline bool is_unit_aligned(const CollectiveParams& params, size_t unit) {
  uintptr_t bits = 0;
  for (int r = 0; r < params.size; ++r) {
    bits |= reinterpret_cast<uintptr_t>(params.send[r]) |
            reinterpret_cast<uintptr_t>(params.recv[r]) | params.send_bytes[r] |
            params.recv_bytes[r];
  }
  return bits % unit == 0;
}

// Calls `act(Case{})` with the case that matches.
template <typename Act>
cudaError_t for_case(const CollectiveParams& params, bool is_fast_path, const Act& act) {
  if (params.size == 2) return is_fast_path ? act(FastCase<2>{}) : act(GenericCaseOf2{});
  if (is_fast_path && params.size == 4) return act(FastCase<4>{});
  if (is_fast_path && params.size == 8) return act(FastCase<8>{});
  return act(GenericCase{});
}

// The same with the element type. Only some types have the fast cases.
template <typename Act>
cudaError_t for_reduction(ReductionType type, const CollectiveParams& params, size_t unit,
                          const Act& act) {
  const bool is_fast_path = params.op == ReductionOp::sum && is_unit_aligned(params, unit);
  return for_type(type, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (kHasFastPath<T>) {
      return for_case(params, is_fast_path, [&](auto which) { return act(zero, which); });
    } else {
      return params.size == 2 ? act(zero, GenericCaseOf2{}) : act(zero, GenericCase{});
    }
  });
}

// Calls load(which) for every case.
template <typename Load>
cudaError_t load_cases(const Load& load) {
  cudaError_t status = load(GenericCase{});
  if (status == cudaSuccess) status = load(GenericCaseOf2{});
  if (status == cudaSuccess) status = load(FastCase<2>{});
  if (status == cudaSuccess) status = load(FastCase<4>{});
  if (status == cudaSuccess) status = load(FastCase<8>{});
  return status;
}

// Calls load(zero, which) for every element type and each of its cases.
template <typename Load>
cudaError_t load_reductions(const Load& load) {
  for (const ReductionType type : kReductionTypes) {
    const cudaError_t status = for_type(type, [&](auto zero) {
      using T = decltype(zero);
      if constexpr (kHasFastPath<T>) {
        return load_cases([&](auto which) { return load(zero, which); });
      } else {
        const cudaError_t loaded = load(zero, GenericCaseOf2{});
        return loaded == cudaSuccess ? load(zero, GenericCase{}) : loaded;
      }
    });
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t load_kernel(Kernel kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
}

}  // namespace torch_overlap::cuda
