// Exchanges by lines: 16 bytes that are stored and read as one, 12 of data and the epoch of their
// round. A line that carries the epoch is there as a whole, so no flag, no fence and no barrier
// stands between its data and its reader. It costs a third more bytes.
#include "torch_overlap/comm/backends/nccl/direct_device.h"

namespace torch_overlap::cuda {
namespace {

// Lines of one thread in a round.
constexpr int kUnroll = G::kLines / G::kThreads;

// Elements of 8 bytes go one a line; the word beside them is not used.
template <typename T>
constexpr int kLineWords = sizeof(T) == 8 ? 2 : 3;

struct LineView {
  Words<3> data;
  uint32_t epoch;
};

__device__ __forceinline__ void store_line(char* to, const LineView& line) {
  const uint64_t low = line.data.at[0] | static_cast<uint64_t>(line.data.at[1]) << 32;
  const uint64_t high = line.data.at[2] | static_cast<uint64_t>(line.epoch) << 32;
  asm volatile(
      "{\n"
      ".reg .b128 line;\n"
      "mov.b128 line, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], line;\n"
      "}" ::"l"(to),
      "l"(low), "l"(high)
      : "memory");
}

__device__ __forceinline__ LineView load_line(const char* from) {
  uint64_t low;
  uint64_t high;
  asm volatile(
      "{\n"
      ".reg .b128 line;\n"
      "ld.relaxed.sys.global.b128 line, [%2];\n"
      "mov.b128 {%0, %1}, line;\n"
      "}"
      : "=l"(low), "=l"(high)
      : "l"(from)
      : "memory");
  return {
      {{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high)}},
      static_cast<uint32_t>(high >> 32)};
}

// The lines that `source` writes to `owner` in the round that makes the epoch `epoch`.
__device__ __forceinline__ char* lines_of(const DirectParams& p, int owner, int source,
                                          uint32_t epoch) {
  const size_t slot = (size_t{blockIdx.x} * G::kLineSlots + epoch % G::kLineSlots) * p.size;
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

// `line` becomes that of `epoch`. True if it never did. All rounds before have been there, though
// the slot still has the line of the one before the last.
__device__ __forceinline__ bool await_line(const DirectParams& p, LineView& line, const char* from,
                                           int source, uint32_t epoch) {
  Patience patience;
  while (line.epoch != epoch) {
    if (patience.is_over(p, source, epoch, epoch - 1)) return true;
    line = load_line(from);
  }
  return false;
}

template <typename T>
__global__ void __launch_bounds__(G::kThreads)
    line_reduce_kernel(const __grid_constant__ DirectParams p) {
  constexpr int kWords = kLineWords<T>;
  constexpr int kData = kWords * 4;
  __shared__ BlockState state;
  const uint64_t bytes = p.send_bytes[0];
  Words<kWords> own[kUnroll];
  const auto load_own = [&](uint32_t chunk) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t line = threadIdx.x + u * G::kThreads;
      const uint64_t at = (static_cast<uint64_t>(chunk) * p.chunk + line) * kData;
      if (line < p.chunk && at < bytes) {
        own[u] = load_words<kWords>(p.send[p.rank] + at, bytes - at);
      }
    }
  };
  bool failed = !begin_block(p, state, [&] { load_own(blockIdx.x); });
  uint32_t round = 0;
  for (uint32_t chunk = blockIdx.x; chunk < p.most_chunks && !failed; chunk += gridDim.x, ++round) {
    const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
    if (round > 0) load_own(chunk);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t line = threadIdx.x + u * G::kThreads;
      const uint64_t at = (first + line) * kData;
      if (line >= p.chunk || at >= bytes) break;
      for (int i = 1; i < p.size; ++i) {
        const int peer = p.rank + i < p.size ? p.rank + i : p.rank + i - p.size;
        const uint32_t epoch = state.epoch[peer] + 1 + round;
        const auto data = p.one_source ? own[u] : load_words<kWords>(p.send[peer] + at, bytes - at);
        store_line(lines_of(p, peer, p.rank, epoch) + line * G::kLineBytes, line_of(data, epoch));
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t line = threadIdx.x + u * G::kThreads;
      const uint64_t at = (first + line) * kData;
      if (line >= p.chunk || at >= bytes) break;
      LineView seen[G::kMostRanks];
#pragma unroll
      for (int source = 0; source < G::kMostRanks; ++source) {
        if (source >= p.size || source == p.rank) continue;
        const uint32_t epoch = state.epoch[source] + 1 + round;
        seen[source] = load_line(lines_of(p, p.rank, source, epoch) + line * G::kLineBytes);
      }
      Accumulator<T, kWords> sum;
#pragma unroll
      for (int source = 0; source < G::kMostRanks; ++source) {
        if (source >= p.size) continue;
        Words<kWords> words = own[u];
        if (source != p.rank) {
          const uint32_t epoch = state.epoch[source] + 1 + round;
          const char* from = lines_of(p, p.rank, source, epoch) + line * G::kLineBytes;
          failed = await_line(p, seen[source], from, source, epoch) || failed;
          words = words_of<kWords>(seen[source]);
        }
        if (source == 0) {
          sum.start(words);
        } else {
          sum.add(p.op, words);
        }
      }
      store_words(p.recv[0] + at, sum.result(p.op, p.size), bytes - at);
    }
    // The slot of the round after the next is free when all threads of the peer are past this one.
    if (chunk + gridDim.x < p.most_chunks) failed = __syncthreads_or(failed) != 0;
  }
  end_block(p, state);
}

// A pair of ranks of which only one has something to say, or has more, still exchanges a line in
// every round: it tells that the slot has been read.
__global__ void __launch_bounds__(G::kThreads)
    line_copy_kernel(const __grid_constant__ DirectParams p) {
  constexpr int kWords = 3;
  constexpr int kData = kWords * 4;
  __shared__ BlockState state;
  const auto thread = static_cast<uint32_t>(threadIdx.x);
  // What this thread sends first.
  const int next = p.rank + 1 < p.size ? p.rank + 1 : 0;
  Words<kWords> ahead{};
  bool failed = !begin_block(p, state, [&] {
    const uint64_t at = (static_cast<uint64_t>(blockIdx.x) * p.chunk + thread) * kData;
    if (thread < p.chunk && at < p.send_bytes[next]) {
      ahead = load_words<kWords>(p.send[next] + at, p.send_bytes[next] - at);
    }
  });
  uint32_t round = 0;
  for (uint32_t chunk = blockIdx.x; chunk < p.most_chunks && !failed; chunk += gridDim.x, ++round) {
    const uint64_t first = static_cast<uint64_t>(chunk) * p.chunk;
    for (uint32_t line = thread; line < p.chunk; line += G::kThreads) {
      const uint64_t at = (first + line) * kData;
      for (int i = 1; i < p.size; ++i) {
        const int peer = p.rank + i < p.size ? p.rank + i : p.rank + i - p.size;
        const bool is_empty = at >= p.send_bytes[peer];
        if (chunk >= p.chunks[peer] || (is_empty && line != 0)) continue;
        const uint32_t epoch = state.epoch[peer] + 1 + round;
        Words<kWords> data = ahead;
        const bool is_loaded = round == 0 && line == thread && (i == 1 || p.one_source);
        if (!is_empty && !is_loaded)
          data = load_words<kWords>(p.send[peer] + at, p.send_bytes[peer] - at);
        store_line(lines_of(p, peer, p.rank, epoch) + line * G::kLineBytes, line_of(data, epoch));
      }
    }
    for (uint32_t line = thread; line < p.chunk; line += G::kThreads) {
      const uint64_t at = (first + line) * kData;
      if (p.recv[p.rank] != p.send[p.rank] && at < p.recv_bytes[p.rank]) {
        const uint64_t left = p.recv_bytes[p.rank] - at;
        store_words(p.recv[p.rank] + at, load_words<kWords>(p.send[p.rank] + at, left), left);
      }
      for (int i = 1; i < p.size; ++i) {
        const int source = p.rank >= i ? p.rank - i : p.rank - i + p.size;
        const bool is_empty = at >= p.recv_bytes[source];
        if (chunk >= p.chunks[source] || (is_empty && line != 0)) continue;
        const uint32_t epoch = state.epoch[source] + 1 + round;
        const char* from = lines_of(p, p.rank, source, epoch) + line * G::kLineBytes;
        LineView seen = load_line(from);
        failed = await_line(p, seen, from, source, epoch) || failed;
        if (is_empty) continue;
        store_words(p.recv[source] + at, seen.data, p.recv_bytes[source] - at);
      }
    }
    if (chunk + gridDim.x < p.most_chunks) failed = __syncthreads_or(failed) != 0;
  }
  end_block(p, state);
}

}  // namespace

cudaError_t launch_line_copy(const DirectParams& params, const DirectLaunch& launch) {
  return launch_direct(line_copy_kernel, params, launch);
}

cudaError_t launch_line_reduce(DirectType type, const DirectParams& params,
                               const DirectLaunch& launch) {
  return for_type(type, [&](auto zero) {
    return launch_direct(line_reduce_kernel<decltype(zero)>, params, launch);
  });
}

cudaError_t load_line_kernels() {
  cudaError_t status = load_kernel(line_copy_kernel);
  for (const DirectType type : kDirectTypes) {
    if (status != cudaSuccess) break;
    status =
        for_type(type, [](auto zero) { return load_kernel(line_reduce_kernel<decltype(zero)>); });
  }
  return status;
}

}  // namespace torch_overlap::cuda
