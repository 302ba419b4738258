#pragma once

// Exchanges by lines: 16 bytes that are stored and read as one, 12 of data and the epoch of their
// round. A line that carries the epoch is there as a whole, so no flag, no fence and no barrier
// stands between its data and its reader. It costs a third more bytes. For .cu files.
#include "torch_overlap/comm/backends/nccl/direct_device.h"
#include "torch_overlap/symm/cuda/line_device.h"

namespace torch_overlap::cuda {

// Elements of 8 bytes go one a line; the word beside them is not used.
template <typename T>
constexpr int kLineWords = sizeof(T) == 8 ? 2 : 3;

struct LineView {
  Words<3> data;
  uint32_t epoch;
};

__device__ __forceinline__ void store_line(char* to, const LineView& line) {
  store_line(to, uint4{line.data.at[0], line.data.at[1], line.data.at[2], line.epoch});
}

__device__ __forceinline__ LineView load_line(const char* from) {
  const uint4 line = load_line(static_cast<const void*>(from));
  return {{{line.x, line.y, line.z}}, line.w};
}

// The lines that `source` writes to `owner` in the round that makes the epoch `epoch`.
template <typename Case>
__device__ __forceinline__ char* lines_of(const DirectParams& p, int owner, int source,
                                          uint32_t epoch) {
  const size_t slot =
      (size_t{blockIdx.x} * G::kLineSlots + epoch % G::kLineSlots) * size_of<Case>(p);
  return p.base[owner] + DirectLayout::kLines + (slot + source) * DirectLayout::lines_of_one_rank();
}

template <int kWords>
__device__ __forceinline__ LineView line_of(const Words<kWords>& words, uint32_t epoch) {
  LineView line{};
#pragma unroll
  for (int i = 0; i < kWords; ++i) line.data.at[i] = words.at[i];
  line.epoch = epoch;
  return line;
}

template <int kWords>
__device__ __forceinline__ Words<kWords> words_of(const LineView& line) {
  Words<kWords> words;
#pragma unroll
  for (int i = 0; i < kWords; ++i) words.at[i] = line.data.at[i];
  return words;
}

__device__ __forceinline__ const uint32_t* epoch_word(const char* line) {
  return reinterpret_cast<const uint32_t*>(line) + 3;
}

// `line` becomes that of `epoch`. True if it never did. All rounds before have been there, though
// the slot still has the line of the one before the last.
__device__ __forceinline__ bool await_line(const DirectParams& p, LineView& line, const char* from,
                                           int source, uint32_t epoch) {
  for (int looks = 1; line.epoch != epoch; ++looks) {
    if (looks % kLooks == 0 && !wait_long(p, epoch_word(from), source, epoch, 1)) return true;
    line = load_line(from);
  }
  return false;
}

// What a thread knows of its block when a kernel begins. Each reads the epochs for itself.
struct LineState {
  uint32_t epoch[G::kMostRanks];  // rounds that were done before this kernel
  Entry entry;
};

// Asks; nothing waits for the answers here.
template <typename Case>
__device__ __forceinline__ LineState begin_lines(const DirectParams& p) {
  begin_kernel(p);
  LineState state{};
  const uint32_t* const epochs = epoch_of(p, 0);
#pragma unroll
  for (int i = 0; i < Case::kMostRanks; i += 4) {
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
__device__ __forceinline__ void end_lines(const DirectParams& p, const LineState& state) {
  __syncthreads();
  const auto thread = static_cast<int>(threadIdx.x);
  uint32_t epoch = 0;
#pragma unroll
  for (int r = 0; r < Case::kMostRanks; ++r) {
    if (thread == r) epoch = state.epoch[r];
  }
  if (thread < size_of<Case>(p) && thread != p.rank) {
    *epoch_of(p, thread) = epoch + rounds_with(p, thread);
  }
  if (thread < kWarp) leave_block(p, state.entry.is_taken != 0);
}

// Gets this thread's line of every source of which is_due(source). All are asked for at once and
// those that are missing again, so that lines that come late cost one look together, and not one
// each. True if one never came.
template <typename Case, typename IsDue>
__device__ __forceinline__ bool receive_lines(const DirectParams& p, const LineState& state,
                                              uint32_t round, const IsDue& is_due,
                                              LineView (&lines)[Case::kMostRanks]) {
  const auto from = [&](int source) {
    return lines_of<Case>(p, p.rank, source, state.epoch[source] + 1 + round) +
           threadIdx.x * G::kLineBytes;
  };
  uint32_t missing = 0;  // bits of sources
#pragma unroll
  for (int source = 0; source < Case::kMostRanks; ++source) {
    if (source < size_of<Case>(p) && source != p.rank && is_due(source)) missing |= 1U << source;
  }
  for (int looks = 1; missing != 0; ++looks) {
#pragma unroll
    for (int source = 0; source < Case::kMostRanks; ++source) {
      if (missing >> source & 1) lines[source] = load_line(from(source));
    }
#pragma unroll
    for (int source = 0; source < Case::kMostRanks; ++source) {
      const uint32_t epoch = state.epoch[source] + 1 + round;
      if ((missing >> source & 1) == 0) continue;
      if (lines[source].epoch == epoch) {
        missing &= ~(1U << source);
      } else if (looks % kLooks == 0 && !wait_long(p, epoch_word(from(source)), source, epoch, 1)) {
        return true;
      }
    }
  }
  return false;
}

// Of what all ranks have, this one `own` and the others `lines`, in the order of ranks.
template <typename T, typename Case, int kWords>
__device__ __forceinline__ Accumulator<Case, T, kWords> sum_of_lines(
    const DirectParams& p, const Words<kWords>& own, const LineView (&lines)[Case::kMostRanks]) {
  Accumulator<Case, T, kWords> sum;
#pragma unroll
  for (int source = 0; source < Case::kMostRanks; ++source) {
    if (source >= size_of<Case>(p)) continue;
    const auto words = source == p.rank ? own : words_of<kWords>(lines[source]);
    if (source == 0) {
      sum.start(words);
    } else {
      sum.add(p.op, words);
    }
  }
  return sum;
}

// send(chunk, round), then take(chunk, round) -> whether a wait failed, in every round. Rounds end
// with a barrier where others follow: the slot of the one after the next is free when all threads
// of the peer are past this one.
template <typename Case, typename Send, typename Take>
__device__ __forceinline__ void exchange_lines(const DirectParams& p, const LineState& state,
                                               const Send& send, const Take& take) {
  const bool has_rounds = p.most_chunks > gridDim.x;
  bool failed = !may_send(p, state.entry);
  uint32_t round = 0;
  for (uint32_t chunk = blockIdx.x; chunk < p.most_chunks && !failed; chunk += gridDim.x, ++round) {
    send(chunk, round);
    failed = take(chunk, round);
    if (has_rounds) failed = __syncthreads_or(failed) != 0;
  }
  end_lines<Case>(p, state);
}

}  // namespace torch_overlap::cuda
