#pragma once

#include <cstdint>

#include "torch_overlap/comm/backends/nccl/direct_kernels.h"
#include "torch_overlap/comm/backends/nccl/direct_words_device.h"
#include "torch_overlap/symm/cuda/wait_device.h"

// What the kernels of direct collectives share. For .cu files.
namespace torch_overlap::cuda {

using G = DirectGeometry;

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

// How far a block and each of its peers are, and whether it may go on. In shared memory.
struct BlockState {
  uint32_t epoch[G::kMostRanks];  // rounds that were done before this kernel
  bool has_failed;
  bool is_busy;  // another kernel of the channel runs
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

// Another kernel of the channel runs: a failure.
__device__ __forceinline__ void give_up_as_busy(const DirectParams& p) {
  WaitRecord what{};
  what.kind = WaitKind::apart;
  what.window = p.window;
  give_up(p.control, what, 0);
}

// Of thread 0 of a block. `is_busy`: the block is another kernel's, which frees it.
__device__ __forceinline__ void leave_block(const DirectParams& p, bool is_busy) {
  if (!is_busy) word_at(p, DirectLayout::kBusy)[blockIdx.x] = 0;
  if (blockIdx.x == 0) *word_at(p, DirectLayout::kNoted) = 0;
}

// False: a wait has failed before, and nothing is sent any more, since it need not be true; or
// another kernel of the channel runs.
__device__ __forceinline__ bool begin_block(const DirectParams& p, BlockState& state) {
  begin_kernel(p);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < p.size) state.epoch[thread] = *static_cast<volatile uint32_t*>(epoch_of(p, thread));
  if (thread == 0) {
    state.is_busy = atomicExch(word_at(p, DirectLayout::kBusy) + blockIdx.x, 1) != 0;
    state.has_failed = has_failed(p.control) || state.is_busy;
    if (state.is_busy) give_up_as_busy(p);
  }
  __syncthreads();
  return !state.has_failed;
}

__device__ __forceinline__ void end_block(const DirectParams& p, const BlockState& state) {
  __syncthreads();
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < p.size && thread != p.rank) {
    *epoch_of(p, thread) = state.epoch[thread] + rounds_with(p, thread);
  }
  if (thread == 0) leave_block(p, state.is_busy);
}

// Of one wait of one thread.
class Patience {
 public:
  // After a look that saw another rank behind: whether to stop looking. Then nothing that this
  // kernel does counts any more: the wait expired, was stopped, or another one had failed.
  __device__ __forceinline__ bool is_over(const DirectParams& p, int peer, uint32_t expected,
                                          uint32_t seen) {
    if (++looks_ % 64 != 0) return false;
    return is_over_now(p, peer, expected, seen);
  }

 private:
  static constexpr uint64_t kSpinNs = 200'000;

  // All threads of a kernel may wait: they leave the host's word to the first of all.
  __device__ static uint64_t look_interval() {
    return blockIdx.x == 0 && threadIdx.x == 0 ? kLookAtHostNs : kManyLookAtHostNs;
  }

  __device__ __noinline__ bool is_over_now(const DirectParams& p, int peer, uint32_t expected,
                                           uint32_t seen) {
    if (*static_cast<const volatile uint32_t*>(p.control.failed) == kFailed) return true;
    const uint64_t now = now_ns();
    if (begin_ == 0) {
      begin_ = now;
      look_at_host_ = now + look_interval();
    }
    if (now >= look_at_host_) {
      look_at_host_ = now + look_interval();
      if (*static_cast<const volatile uint32_t*>(&p.control.record->stopped) != 0) {
        atomicCAS(p.control.failed, kFine, kFailed);
        return true;
      }
    }
    const uint64_t waited = now - begin_;
    if (waited > kSpinNs) __nanosleep(500);
    if (waited < p.control.timeout_ns) return false;
    note(p, peer, expected, seen);
    if (waited < p.control.timeout_ns + kGraceNs) return false;
    WaitRecord what{};
    what.kind = WaitKind::step;
    what.window = p.window;
    what.peer = peer;
    what.expected = expected;
    what.block = blockIdx.x;
    give_up(p.control, what, seen);
    return true;
  }

  // For the watchdog's message. When a rank is missing, block 0 misses it.
  __device__ void note(const DirectParams& p, int peer, uint32_t expected, uint32_t seen) const {
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

  uint32_t looks_ = 0;
  uint64_t begin_ = 0;
  uint64_t look_at_host_ = 0;
};

// Flags that say: all of this round, of this block, by `source`, is there.
__device__ __forceinline__ uint32_t* flag_of(const DirectParams& p, int kind, int owner,
                                             int source) {
  const size_t index = blockIdx.x * G::kMostRanks + source;
  return reinterpret_cast<uint32_t*>(p.base[owner] + DirectLayout::kFlags +
                                     kind * DirectLayout::kFlagsOfOneKind + index * G::kFlagBytes);
}

// The vectors that `source` writes to `owner` in the round that makes the epoch `epoch`.
__device__ __forceinline__ char* vectors_of(const DirectParams& p, int owner, int source,
                                            uint32_t epoch) {
  const size_t slot = (size_t{blockIdx.x} * G::kVectorSlots + epoch % G::kVectorSlots) * p.size;
  return p.base[owner] + p.vectors_at + (slot + source) * DirectLayout::vectors_of_one_rank();
}

// After all threads have stored what goes to `peer`: says so, one thread for each peer. Between
// barriers of the block.
__device__ __forceinline__ void raise_flag(const DirectParams& p, const BlockState& state, int kind,
                                           uint32_t round) {
  const auto peer = static_cast<int>(threadIdx.x);
  if (peer >= p.size || peer == p.rank || round >= rounds_with(p, peer)) return;
  store_release(flag_of(p, kind, peer, p.rank), state.epoch[peer] + 1 + round);
}

// Waits for the flags of all peers that take part in the round, and for all threads. False: gave
// up, for all threads alike.
__device__ __forceinline__ bool await_flags(const DirectParams& p, const BlockState& state,
                                            int kind, uint32_t round) {
  const auto peer = static_cast<int>(threadIdx.x);
  bool failed = false;
  if (peer < p.size && peer != p.rank && round < rounds_with(p, peer)) {
    const uint32_t expected = state.epoch[peer] + 1 + round;
    const uint32_t* flag = flag_of(p, kind, p.rank, peer);
    Patience patience;
    // A peer is ahead by less than the slots; anything else is old, however old.
    uint32_t seen = load_acquire(flag);
    while (seen - expected >= G::kVectorSlots) {
      failed = patience.is_over(p, peer, expected, seen);
      if (failed) break;
      seen = load_acquire(flag);
    }
  }
  return __syncthreads_or(failed) == 0;
}

// --- Launching -----------------------------------------------------------------------------------

template <typename Kernel>
cudaError_t launch_direct(Kernel kernel, const DirectParams& params, const DirectLaunch& launch) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(launch.blocks);
  config.blockDim = dim3(launch.threads);
  config.stream = launch.stream;
  config.attrs = &attribute;
  config.numAttrs = launch.dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
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
  if (is_usual && params.size == 2) return act(UsualCase<2>{});
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
      return act(zero, AnyCase{});
    }
  });
}

// load(which) of every case.
template <typename Load>
cudaError_t load_cases(const Load& load) {
  cudaError_t status = load(AnyCase{});
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
        return load(zero, AnyCase{});
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
