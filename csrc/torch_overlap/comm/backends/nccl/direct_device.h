#pragma once

#include <cstdint>

#include "torch_overlap/comm/backends/nccl/direct_kernels.h"
#include "torch_overlap/comm/backends/nccl/direct_words_device.h"
#include "torch_overlap/symm/cuda/wait_device.h"

// What the kernels of direct collectives share. For .cu files.
namespace torch_overlap::cuda {

using G = DirectGeometry;

inline constexpr int kWarp = 32;
static_assert(G::kMostRanks <= kWarp);
// At least. A kernel that is launched before the one in front of it has ended takes room that
// another communicator's may need: with half of all SMs for each there is room for both.
template <typename Case>
inline constexpr int kBlocksOfSm = Case::kMostRanks == 2 ? 4 : 2;

// The host's watchdog reports an operation that is late. This much later the device does it: for
// replays, which the host does not watch.
inline constexpr uint64_t kGraceNs = 1'000'000'000;

__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- A block's part of an operation --------------------------------------------------------------

// How far a block and each of its peers are. In shared memory.
struct BlockState {
  uint32_t epoch[G::kMostRanks];  // rounds that were done before this kernel
  bool is_taken;                  // Entry::is_taken
};

__device__ __forceinline__ uint32_t* word_at(const DirectParams& p, size_t offset) {
  return reinterpret_cast<uint32_t*>(p.base[p.rank] + offset);
}

__device__ __forceinline__ uint32_t* epoch_of(const DirectParams& p, int peer) {
  return word_at(p, DirectLayout::kEpochs) + blockIdx.x * G::kMostRanks + peer;
}

// How many rounds this block does with `peer`: chunks block, block + grid, block + 2 grid, ...
__device__ __forceinline__ uint32_t rounds_with(const DirectParams& p, int peer) {
  const uint32_t chunks = p.chunks[peer];
  return chunks > blockIdx.x ? (chunks - blockIdx.x - 1) / gridDim.x + 1 : 0;
}

__device__ __forceinline__ void begin_kernel(const DirectParams& p) {
  wait_for_kernel_before();
  let_next_kernel_launch();
}

// What thread 0 finds of its block; all others find nothing. Not 0: nothing may be sent.
struct Entry {
  uint32_t is_taken;    // another kernel of the channel runs in this block's place, and frees it
  uint32_t has_failed;  // a wait has failed before: what would be sent need not be true
};

// Takes the block. Asks in one go and without a branch, so that nothing waits before the answers
// are used.
__device__ __forceinline__ Entry enter_block(const DirectParams& p) {
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
      : "=&r"(entry.is_taken), "=&r"(entry.has_failed)
      : "l"(word_at(p, DirectLayout::kBusy) + blockIdx.x), "l"(p.control.failed), "r"(threadIdx.x)
      : "memory");
  return entry;
}

// Whether the block may send: the same for all threads, which meet here.
__device__ __forceinline__ bool may_send(const DirectParams& p, const Entry& entry) {
  const bool is_good = __syncthreads_or(static_cast<int>(entry.is_taken | entry.has_failed)) == 0;
  if (entry.is_taken != 0) {
    WaitRecord what{};
    what.kind = WaitKind::apart;
    what.window = p.window;
    give_up(p.control, what, 0);
  }
  return is_good;
}

// Of the first warp of a block, after its epochs are written.
__device__ __forceinline__ void leave_block(const DirectParams& p, bool is_taken) {
  __syncwarp();
  if (threadIdx.x != 0) return;
  if (!is_taken) word_at(p, DirectLayout::kBusy)[blockIdx.x] = 0;
  if (blockIdx.x == 0) *word_at(p, DirectLayout::kNoted) = 0;
}

// False: nothing may be sent.
__device__ __forceinline__ bool enter_block(const DirectParams& p, BlockState& state) {
  const auto thread = static_cast<int>(threadIdx.x);
  const Entry entry = enter_block(p);
  if (thread < p.size) state.epoch[thread] = *static_cast<volatile uint32_t*>(epoch_of(p, thread));
  if (thread == 0) state.is_taken = entry.is_taken != 0;
  return may_send(p, entry);
}

__device__ __forceinline__ bool begin_block(const DirectParams& p, BlockState& state) {
  begin_kernel(p);
  return enter_block(p, state);
}

// `has_rounds`: but for those with each peer, all that was done is in `state`.
__device__ __forceinline__ void end_block(const DirectParams& p, const BlockState& state,
                                          bool has_rounds = true) {
  __syncthreads();
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < p.size && thread != p.rank) {
    *epoch_of(p, thread) = state.epoch[thread] + (has_rounds ? rounds_with(p, thread) : 0);
  }
  if (thread < kWarp) leave_block(p, state.is_taken);
}

// --- Waiting -------------------------------------------------------------------------------------

// For the watchdog's message. When a rank is missing, block 0 misses it.
__device__ __forceinline__ void note_late(const DirectParams& p, int peer, uint32_t expected,
                                          uint32_t seen) {
  if (blockIdx.x != 0) return;
  if (atomicExch(word_at(p, DirectLayout::kNoted), 1) != 0) return;
  volatile WaitRecord* record = p.control.record;
  record->late.peer = peer;
  record->late.block = blockIdx.x;
  record->late.expected = expected;
  record->late.seen = seen;
  __threadfence_system();
  record->is_late = 1;
}

// Whether what carries the epoch `seen` is of the round awaited, or of one of the next that the
// peer may be ahead: of less than `slots`. Anything else is old.
__device__ __forceinline__ bool is_there(uint32_t seen, uint32_t expected, uint32_t slots) {
  return seen - expected < slots;
}

// Of a thread that has looked kLooks times: returns when `word`, which only `peer` writes, is
// there, without the order of an acquire. False: nothing that this kernel does counts any more: the
// wait expired, was stopped, or another one had failed.
inline constexpr int kLooks = 64;

static __device__ __noinline__ bool wait_long(const DirectParams& p, const uint32_t* word, int peer,
                                              uint32_t expected, uint32_t slots) {
  constexpr uint64_t kSpinNs = 200'000;
  // All threads of a kernel may wait: a few look at the host's word often, as long as they wait
  // themselves. Those that wait for rank 0 or 1, or for whomever a warp's first thread waits for.
  const bool is_lookout = blockIdx.x == 0 && threadIdx.x % kWarp <= 1;
  const uint64_t look_interval = is_lookout ? kLookAtHostNs : kManyLookAtHostNs;
  const uint64_t begin = now_ns();
  uint64_t look_at_host = begin + look_interval;
  while (true) {
    if (*static_cast<const volatile uint32_t*>(p.control.failed) == kFailed) return false;
    uint32_t seen = load_relaxed(word);
    for (int looks = 1; looks < kLooks && !is_there(seen, expected, slots); ++looks) {
      seen = load_relaxed(word);
    }
    if (is_there(seen, expected, slots)) return true;
    const uint64_t now = now_ns();
    if (now >= look_at_host) {
      look_at_host = now + look_interval;
      if (*static_cast<const volatile uint32_t*>(&p.control.record->stopped) != 0) {
        atomicCAS(p.control.failed, kFine, kFailed);
        return false;
      }
    }
    const uint64_t waited = now - begin;
    if (waited > kSpinNs) __nanosleep(500);
    if (waited < p.control.timeout_ns) continue;
    // A line's slot still has that of an earlier round, though the last one has been there.
    if (slots == 1) seen = expected - 1;
    note_late(p, peer, expected, seen);
    if (waited < p.control.timeout_ns + kGraceNs) continue;
    WaitRecord what{};
    what.kind = WaitKind::step;
    what.window = p.window;
    what.peer = peer;
    what.expected = expected;
    what.block = blockIdx.x;
    give_up(p.control, what, seen);
    return false;
  }
}

// --- Flags and vectors ---------------------------------------------------------------------------

// Flags that say: all of this round, of this block, by `source`, is there.
__device__ __forceinline__ uint32_t* flag_of(const DirectParams& p, int kind, int owner,
                                             int source) {
  const size_t index = blockIdx.x * G::kMostRanks + source;
  return reinterpret_cast<uint32_t*>(p.base[owner] + DirectLayout::kFlags +
                                     kind * DirectLayout::kFlagsOfOneKind + index * G::kFlagBytes);
}

// The vectors that `source` writes to `owner` in the round that makes the epoch `epoch`.
template <typename Case>
__device__ __forceinline__ char* vectors_of(const DirectParams& p, int owner, int source,
                                            uint32_t epoch) {
  const size_t slot =
      (size_t{blockIdx.x} * G::kVectorSlots + epoch % G::kVectorSlots) * size_of<Case>(p);
  return p.base[owner] + p.vectors_at + (slot + source) * DirectLayout::vectors_of_one_rank();
}

// --- Slices, in an all_reduce by two shots: of rank r, which adds it up.

struct Slice {
  uint64_t begin;  // in the message
  uint64_t bytes;
};

__device__ __forceinline__ Slice slice_of(const DirectParams& p, int rank) {
  const uint64_t all = p.send_bytes[0];
  const uint64_t each = p.send_bytes[1];  // of every slice but the last ones
  const uint64_t begin = min(rank * each, all);
  return {begin, min(each, all - begin)};
}

// --- The ranks around this one

// The rank `k` places after this one, and before it, in a ring.
template <typename Case>
__device__ __forceinline__ int rank_after(const DirectParams& p, int k) {
  return p.rank + k < size_of<Case>(p) ? p.rank + k : p.rank + k - size_of<Case>(p);
}
template <typename Case>
__device__ __forceinline__ int rank_before(const DirectParams& p, int k) {
  return p.rank >= k ? p.rank - k : p.rank - k + size_of<Case>(p);
}

// seen[r]: this rank's `own`, or what rank r has staged, staged(r).
template <typename Case, typename Staged>
__device__ __forceinline__ void load_vectors(const DirectParams& p, const Words<4>& own,
                                             Words<4> (&seen)[Case::kMostRanks],
                                             const Staged& staged) {
#pragma unroll
  for (int source = 0; source < Case::kMostRanks; ++source) {
    if (source >= size_of<Case>(p)) continue;
    seen[source] = own;
    if (source != p.rank) seen[source] = load_staged(staged(source));
  }
}

// In the order of ranks.
template <typename T, typename Case>
__device__ __forceinline__ Accumulator<Case, T, 4> accumulate(
    const DirectParams& p, const Words<4> (&seen)[Case::kMostRanks]) {
  Accumulator<Case, T, 4> sum;
  sum.start(seen[0]);
#pragma unroll
  for (int source = 1; source < Case::kMostRanks; ++source) {
    if (source < size_of<Case>(p)) sum.add(p.op, seen[source]);
  }
  return sum;
}

template <typename T, typename Case, typename Staged>
__device__ __forceinline__ Words<4> reduce_vectors(const DirectParams& p, const Words<4>& own,
                                                   const Staged& staged) {
  Words<4> seen[Case::kMostRanks];
  load_vectors<Case>(p, own, seen, staged);
  return accumulate<T, Case>(p, seen).result(p.op, size_of<Case>(p));
}

// Whether this thread is the one that speaks with a peer, of its own number, in a round.
__device__ __forceinline__ bool speaks_in(const DirectParams& p, uint32_t round) {
  const auto peer = static_cast<int>(threadIdx.x);
  return peer < p.size && peer != p.rank && round < rounds_with(p, peer);
}

// After all threads have stored what goes to the peers, and a barrier: says so, one thread for each
// peer.
__device__ __forceinline__ void raise_flag(const DirectParams& p, const BlockState& state, int kind,
                                           uint32_t round) {
  if (!speaks_in(p, round)) return;
  const auto peer = static_cast<int>(threadIdx.x);
  store_release(flag_of(p, kind, peer, p.rank), state.epoch[peer] + 1 + round);
}

// Returns when the peer has raised its flag. True if it never did.
__device__ __forceinline__ bool await_flag(const DirectParams& p, int kind, int peer,
                                           uint32_t expected) {
  const uint32_t* const flag = flag_of(p, kind, p.rank, peer);
  constexpr uint32_t kSlots = G::kVectorSlots;
  for (int looks = 1; !is_there(load_acquire(flag), expected, kSlots); ++looks) {
    if (looks % kLooks == 0 && !wait_long(p, flag, peer, expected, kSlots)) return true;
  }
  return false;
}

// Waits for the flags of all peers that take part in the round, and for all threads. False: gave
// up, for all threads alike.
__device__ __forceinline__ bool await_flags(const DirectParams& p, const BlockState& state,
                                            int kind, uint32_t round) {
  const auto peer = static_cast<int>(threadIdx.x);
  const bool failed =
      speaks_in(p, round) && await_flag(p, kind, peer, state.epoch[peer] + 1 + round);
  return __syncthreads_or(failed) == 0;
}

// --- Launching -----------------------------------------------------------------------------------

template <typename Kernel, typename... Params>
cudaError_t launch_direct(Kernel kernel, const DirectLaunch& launch, const Params&... params) {
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

inline constexpr DirectType kDirectTypes[] = {DirectType::i32,  DirectType::i64, DirectType::f16,
                                              DirectType::bf16, DirectType::f32, DirectType::f64};
template <typename T>
inline constexpr bool kIsUsualType =
    std::is_same_v<T, float> || std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

// Calls `act(T{})` with the element type.
template <typename Act>
cudaError_t for_type(DirectType type, const Act& act) {
  switch (type) {
    case DirectType::i32:
      return act(int32_t{});
    case DirectType::i64:
      return act(int64_t{});
    case DirectType::f16:
      return act(__half{});
    case DirectType::bf16:
      return act(__nv_bfloat16{});
    case DirectType::f32:
      return act(float{});
    case DirectType::f64:
      return act(double{});
  }
  return cudaErrorInvalidValue;
}

// Whether all that goes and comes is of whole units of `unit` bytes, aligned as such.
inline bool is_whole(const DirectParams& params, size_t unit) {
  uintptr_t bits = 0;  // of send_bytes, [0] is the size also where [1] is that of slices
  for (int r = 0; r < params.size; ++r) {
    bits |= reinterpret_cast<uintptr_t>(params.send[r]) |
            reinterpret_cast<uintptr_t>(params.recv[r]) | params.send_bytes[r] |
            params.recv_bytes[r];
  }
  return bits % unit == 0;
}

// Calls `act(Case{})` with the case of kernels that fits.
template <typename Act>
cudaError_t for_case(const DirectParams& params, bool is_usual, const Act& act) {
  if (params.size == 2) return is_usual ? act(UsualCase<2>{}) : act(AnyOfTwo{});
  if (is_usual && params.size == 4) return act(UsualCase<4>{});
  if (is_usual && params.size == 8) return act(UsualCase<8>{});
  return act(AnyCase{});
}

// The same with the element type, which usual cases have few of.
template <typename Act>
cudaError_t for_reduction(DirectType type, const DirectParams& params, size_t unit,
                          const Act& act) {
  const bool is_usual = params.op == DirectOp::sum && is_whole(params, unit);
  return for_type(type, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (kIsUsualType<T>) {
      return for_case(params, is_usual, [&](auto which) { return act(zero, which); });
    } else {
      return params.size == 2 ? act(zero, AnyOfTwo{}) : act(zero, AnyCase{});
    }
  });
}

// load(which) of every case.
template <typename Load>
cudaError_t load_cases(const Load& load) {
  cudaError_t status = load(AnyCase{});
  if (status == cudaSuccess) status = load(AnyOfTwo{});
  if (status == cudaSuccess) status = load(UsualCase<2>{});
  if (status == cudaSuccess) status = load(UsualCase<4>{});
  if (status == cudaSuccess) status = load(UsualCase<8>{});
  return status;
}

// load(zero, which) of every element type and the cases that it has.
template <typename Load>
cudaError_t load_reductions(const Load& load) {
  for (const DirectType type : kDirectTypes) {
    const cudaError_t status = for_type(type, [&](auto zero) {
      using T = decltype(zero);
      if constexpr (kIsUsualType<T>) {
        return load_cases([&](auto which) { return load(zero, which); });
      } else {
        const cudaError_t loaded = load(zero, AnyOfTwo{});
        return loaded == cudaSuccess ? load(zero, AnyCase{}) : loaded;
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
