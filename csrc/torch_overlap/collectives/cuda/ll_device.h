#pragma once

// LL exchanges: packets of 16 bytes that are stored and loaded as one, with 12 bytes of data and
// the epoch of the round. A packet that carries the epoch has arrived as a whole, so no flag, fence
// or barrier is needed between its data and its reader. LL sends a third more bytes. For .cu files.
#include "torch_overlap/collectives/cuda/protocol_device.h"
#include "torch_overlap/symm/cuda/ll_packet_device.h"

namespace torch_overlap::cuda {

// Elements of 8 bytes are sent one per packet; the word next to them is not used.
template <typename T>
constexpr int kLLWords = sizeof(T) == 8 ? 2 : 3;

struct LLPacketView {
  Words<3> data;
  uint32_t epoch;
};

__device__ __forceinline__ void store_ll(char* to, const LLPacketView& packet) {
  store_ll(to, uint4{packet.data.at[0], packet.data.at[1], packet.data.at[2], packet.epoch});
}

__device__ __forceinline__ LLPacketView load_ll(const char* from) {
  const uint4 packet = load_ll(static_cast<const void*>(from));
  return {{{packet.x, packet.y, packet.z}}, packet.w};
}

// Returns the packets that `source` writes to `owner` in the round with this epoch.
template <typename Case>
__device__ __forceinline__ char* ll_packets_of(const CollectiveParams& p, int owner, int source,
                                               uint32_t epoch) {
  const size_t slot = (size_t{blockIdx.x} * G::kLLSlots + epoch % G::kLLSlots) * size_of<Case>(p);
  return p.base[owner] + CollectiveLayout::kLL +
         (slot + source) * CollectiveLayout::ll_bytes_per_rank();
}

template <int kWords>
__device__ __forceinline__ LLPacketView ll_packet_of(const Words<kWords>& words, uint32_t epoch) {
  LLPacketView packet{};
#pragma unroll
  for (int i = 0; i < kWords; ++i) packet.data.at[i] = words.at[i];
  packet.epoch = epoch;
  return packet;
}

template <int kWords>
__device__ __forceinline__ Words<kWords> packet_data(const LLPacketView& packet) {
  Words<kWords> words;
#pragma unroll
  for (int i = 0; i < kWords; ++i) words.at[i] = packet.data.at[i];
  return words;
}

__device__ __forceinline__ const uint32_t* epoch_word(const char* packet) {
  return reinterpret_cast<const uint32_t*>(packet) + 3;
}

// Reloads `line` until it carries `epoch`. Returns true if it never did. All earlier rounds have
// arrived, although the slot still holds the packet of two rounds before.
__device__ __forceinline__ bool await_ll(const CollectiveParams& p, LLPacketView& packet,
                                         const char* from, int source, uint32_t epoch) {
  for (int spins = 1; packet.epoch != epoch; ++spins) {
    if (spins % kSpinsBeforeCheck == 0 && !wait_slow_path(p, epoch_word(from), source, epoch, 1))
      return true;
    packet = load_ll(from);
  }
  return false;
}

// State of a block when a kernel begins. Each thread reads the epochs itself.
struct LLState {
  uint32_t epoch[G::kMaxRanks];  // rounds completed before this kernel
  Entry entry;
};

// Issues the loads. Nothing waits for the results here.
template <typename Case>
__device__ __forceinline__ LLState begin_ll(const CollectiveParams& p) {
  begin_kernel(p);
  LLState state{};
  const uint32_t* const epochs = epoch_of(p, 0);
#pragma unroll
  for (int i = 0; i < Case::kMaxRanks; i += 4) {
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(state.epoch[i]), "=r"(state.epoch[i + 1]), "=r"(state.epoch[i + 2]),
                   "=r"(state.epoch[i + 3])
                 : "l"(epochs + i)
                 : "memory");
  }
  state.entry = enter_block(p);
  return state;
}

template <typename Case>
__device__ __forceinline__ void end_ll(const CollectiveParams& p, const LLState& state) {
  __syncthreads();
  const auto thread = static_cast<int>(threadIdx.x);
  uint32_t epoch = 0;
#pragma unroll
  for (int r = 0; r < Case::kMaxRanks; ++r) {
    if (thread == r) epoch = state.epoch[r];
  }
  if (thread < size_of<Case>(p) && thread != p.rank) {
    *epoch_of(p, thread) = epoch + rounds_with(p, thread);
  }
  if (thread < kWarp) leave_block(p, state.entry.is_busy != 0);
}

// Receives this thread's packet of every source for which is_due(source). All packets are requested
// at once, and then the missing ones again, so that several late packets cost one poll together and
// not one each. Returns true if a packet never arrived.
template <typename Case, typename IsDue>
__device__ __forceinline__ bool receive_ll(const CollectiveParams& p, const LLState& state,
                                           uint32_t round, const IsDue& is_due,
                                           LLPacketView (&packets)[Case::kMaxRanks]) {
  const auto from = [&](int source) {
    return ll_packets_of<Case>(p, p.rank, source, state.epoch[source] + 1 + round) +
           threadIdx.x * G::kLLPacketBytes;
  };
  uint32_t missing = 0;  // bit mask of sources
#pragma unroll
  for (int source = 0; source < Case::kMaxRanks; ++source) {
    if (source < size_of<Case>(p) && source != p.rank && is_due(source)) missing |= 1U << source;
  }
  for (int spins = 1; missing != 0; ++spins) {
#pragma unroll
    for (int source = 0; source < Case::kMaxRanks; ++source) {
      if (missing >> source & 1) packets[source] = load_ll(from(source));
    }
#pragma unroll
    for (int source = 0; source < Case::kMaxRanks; ++source) {
      const uint32_t epoch = state.epoch[source] + 1 + round;
      if ((missing >> source & 1) == 0) continue;
      if (packets[source].epoch == epoch) {
        missing &= ~(1U << source);
      } else if (spins % kSpinsBeforeCheck == 0 &&
                 !wait_slow_path(p, epoch_word(from(source)), source, epoch, 1)) {
        return true;
      }
    }
  }
  return false;
}

// Reduces in rank order: `own` for this rank, and `lines` for the others.
template <typename T, typename Case, int kWords>
__device__ __forceinline__ Accumulator<Case, T, kWords> sum_of_ll_packets(
    const CollectiveParams& p, const Words<kWords>& own,
    const LLPacketView (&packets)[Case::kMaxRanks]) {
  Accumulator<Case, T, kWords> sum;
#pragma unroll
  for (int source = 0; source < Case::kMaxRanks; ++source) {
    if (source >= size_of<Case>(p)) continue;
    const auto words = source == p.rank ? own : packet_data<kWords>(packets[source]);
    if (source == 0) {
      sum.start(words);
    } else {
      sum.add(p.op, words);
    }
  }
  return sum;
}

// Calls send(chunk, round), then take(chunk, round), in every round. take() returns true if a wait
// failed. A round ends with a barrier if the kernel has more than one: the slot of the round after
// the next is free when all threads of the peer are past this round.
template <typename Case, typename Send, typename Take>
__device__ __forceinline__ void exchange_ll(const CollectiveParams& p, const LLState& state,
                                            const Send& send, const Take& take) {
  const bool has_rounds = p.max_chunks > gridDim.x;
  bool failed = !try_enter(p, state.entry);
  uint32_t round = 0;
  for (uint32_t chunk = blockIdx.x; chunk < p.max_chunks && !failed; chunk += gridDim.x, ++round) {
    send(chunk, round);
    failed = take(chunk, round);
    if (has_rounds) failed = __syncthreads_or(failed) != 0;
  }
  end_ll<Case>(p, state);
}

}  // namespace torch_overlap::cuda
