#pragma once

// Exchanges by lines of 128 bytes (after NCCL's protocol LL128): 120 of data, and the epoch of
// their round in the last word. Eight threads of a warp store a line by one instruction, and load
// it by one. Links carry such a store as a whole, and the cache of the owner takes and gives 128
// bytes at once, so that a load that sees the epoch has the data too. That is what GPUs behind
// NVLink do, and one GPU's own memory (DirectProblem::has_ll128), and no promise of the memory
// model's. For .cu files.
#include "torch_overlap/comm/backends/nccl/direct_line_device.h"

namespace torch_overlap::cuda::ll128 {

constexpr unsigned int kAll = ~0U;
constexpr int kLanesOfLine = G::kWideLineBytes / G::kVectorBytes;
constexpr uint32_t kMostWarps = G::kThreads / kWarp;
static_assert(kWarp / kLanesOfLine * G::kWideLineBytes == G::kWideUnitBytes);
// Room for two communicators' kernels of most_wide_blocks() on 128 SMs, as kBlocksOfSm has it for
// others on fewer: with registers for four blocks on an SM, sums of two ranks are spilled.
template <typename Case>
inline constexpr int kWideBlocksOfSm = Case::kMostRanks == 2 ? 3 : 2;

__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ uint32_t warp_of_block() { return threadIdx.x / kWarp; }

// What this lane carries of a unit, four lines: 16 bytes, or 8 beside the epoch. The data of every
// other line begin with the short piece, so that all others are aligned in a unit as vectors are.
struct Lane {
  uint32_t line_at;  // in the unit, as what follows
  uint32_t at;
  bool is_short;
};

__device__ __forceinline__ Lane this_lane() {
  const int line = lane_of_warp() / kLanesOfLine;
  const int place = lane_of_warp() % kLanesOfLine;
  const bool is_short = place == kLanesOfLine - 1;
  const int in_line = line % 2 == 0 ? place * G::kVectorBytes
                      : is_short    ? 0
                                    : place * G::kVectorBytes + G::kVectorBytes / 2;
  const auto line_at = static_cast<uint32_t>(line * G::kWideLineData);
  return {line_at, line_at + in_line, is_short};
}

// A unit of a message.
struct UnitPart {
  uint64_t begin;
  uint32_t bytes;  // that there are

  __device__ __forceinline__ bool has_line(const Lane& lane) const { return lane.line_at < bytes; }
  __device__ __forceinline__ bool has_data(const Lane& lane) const { return lane.at < bytes; }
};

// Unit `unit` of a chunk, of a message of `bytes`.
__device__ __forceinline__ UnitPart part_of(const DirectParams& p, uint32_t chunk, uint32_t unit,
                                            uint64_t bytes) {
  const uint64_t begin = (static_cast<uint64_t>(chunk) * p.chunk + unit) * G::kWideUnitData;
  const uint64_t left = begin < bytes ? bytes - begin : 0;
  return {begin, static_cast<uint32_t>(min(left, uint64_t{G::kWideUnitData}))};
}

// This lane's piece of a part of `message`; zeros where it has none.
template <typename Case>
__device__ __forceinline__ Words<4> load_piece(const char* message, const UnitPart& part,
                                               const Lane& lane) {
  Words<4> out{};
  if (!part.has_data(lane)) return out;
  const char* const from = message + part.begin + lane.at;
  if (!lane.is_short) return load_words<Case, 4>(from, part.bytes - lane.at);
  if constexpr (Case::kIsWhole) {
    const uint2 both = *reinterpret_cast<const uint2*>(from);
    out.at[0] = both.x;
    out.at[1] = both.y;
  } else {
    const auto both = load_any<2>(from, part.bytes - lane.at);
    out.at[0] = both.at[0];
    out.at[1] = both.at[1];
  }
  return out;
}

template <typename Case>
__device__ __forceinline__ void store_piece(char* message, const UnitPart& part, const Lane& lane,
                                            const Words<4>& words) {
  if (!part.has_data(lane)) return;
  char* const to = message + part.begin + lane.at;
  if (!lane.is_short) return store_words<Case>(to, words, part.bytes - lane.at);
  if constexpr (Case::kIsWhole) {
    *reinterpret_cast<uint2*>(to) = uint2{words.at[0], words.at[1]};
  } else {
    store_any<2>(to, {{words.at[0], words.at[1]}}, part.bytes - lane.at);
  }
}

enum class Kind : int { parts, sums };

// Where unit `unit` of a chunk lies that `source` writes to `owner`.
template <typename Case>
__device__ __forceinline__ char* unit_of(const DirectParams& p, int owner, int source,
                                         uint32_t epoch, uint32_t unit, Kind kind = Kind::parts) {
  const int size = size_of<Case>(p);
  const size_t slot = size_t{blockIdx.x} * G::kLineSlots + epoch % G::kLineSlots;
  const size_t of_kind = slot * G::wide_kinds(size) + static_cast<int>(kind);
  return p.base[owner] + p.wide_at + (of_kind * size + source) * DirectLayout::wide_of_one_rank() +
         unit * G::kWideUnitBytes;
}

// Of a whole warp, as all that follows: where this lane's line is due it is so for the whole line.
__device__ __forceinline__ void store_wide(char* unit, const Words<4>& words, const Lane& lane,
                                           uint32_t epoch, bool is_due) {
  __syncwarp();
  if (!is_due) return;
  store_line(unit + lane_of_warp() * G::kVectorBytes,
             uint4{words.at[0], words.at[1], words.at[2], lane.is_short ? epoch : words.at[3]});
}
__device__ __forceinline__ uint4 load_wide(const char* unit, bool is_due) {
  __syncwarp();
  uint4 line{};
  if (is_due) line = load_line(static_cast<const void*>(unit + lane_of_warp() * G::kVectorBytes));
  return line;
}

// Of lines of which the bits of their last lanes are set in `missing`: returns when they are there.
// True, for all lanes, if one never came. Each is waited for by another of the first lanes, of
// which two look at the host's word often (wait_long).
static __device__ __noinline__ bool wait_for_lines(const DirectParams& p, const char* unit,
                                                   int source, uint32_t epoch, uint32_t missing) {
  bool failed = false;
  const int line = lane_of_warp();
  if (line < kWarp / kLanesOfLine && (missing >> (line * kLanesOfLine + kLanesOfLine - 1) & 1)) {
    const char* const end = unit + (line + 1) * G::kWideLineBytes;
    failed = !wait_long(p, reinterpret_cast<const uint32_t*>(end) - 1, source, epoch, 1);
  }
  return __any_sync(kAll, failed) != 0;
}

// `line`, which has been loaded, becomes what `epoch` has brought. True, for all lanes, if it never
// did.
__device__ __forceinline__ bool await_wide(const DirectParams& p, uint4& line, const char* unit,
                                           int source, const Lane& lane, uint32_t epoch,
                                           bool is_due) {
  for (int looks = 1;; ++looks) {
    const uint32_t missing = __ballot_sync(kAll, is_due && lane.is_short && line.w != epoch);
    if (missing == 0) return false;
    if (looks % kLooks == 0 && wait_for_lines(p, unit, source, epoch, missing)) return true;
    line = load_wide(unit, is_due);
  }
}

__device__ __forceinline__ Words<4> words_of(const uint4& line) {
  return {{line.x, line.y, line.z, line.w}};
}

// Calls act(unit) for the units of a chunk that are this warp's.
template <typename Act>
__device__ __forceinline__ void for_units(const DirectParams& p, const Act& act) {
#pragma unroll 1
  for (uint32_t unit = warp_of_block(); unit < p.chunk; unit += kMostWarps) act(unit);
}

// What a warp sends, unit by unit. The first piece of what goes to the next rank, often of all that
// goes out, is loaded while the block still asks whether it may send.
template <typename Case>
class Sender {
 public:
  __device__ __forceinline__ Sender(const DirectParams& p, const Lane& lane)
      : p_(p), lane_(lane), next_(rank_after<Case>(p, 1)) {
    piece_ = load(next_, part(blockIdx.x, warp_of_block(), next_));
  }

  // Of a unit that follows the one before.
  __device__ __forceinline__ void begin_unit(uint32_t chunk, uint32_t unit) {
    if (!is_first_) piece_ = load(next_, part(chunk, unit, next_));
    is_first_ = false;
  }
  // To a peer, in the round that makes the epoch `epoch`. is_due(part): see store_wide().
  template <typename IsDue>
  __device__ __forceinline__ void send(int peer, uint32_t chunk, uint32_t unit, uint32_t epoch,
                                       const IsDue& is_due) const {
    const UnitPart of_peer = part(chunk, unit, peer);
    const bool is_loaded = Case::kMostRanks == 2 || p_.one_source || peer == next_;
    const auto words = is_loaded ? piece_ : load(peer, of_peer);
    store_wide(unit_of<Case>(p_, peer, p_.rank, epoch, unit), words, lane_, epoch, is_due(of_peer));
  }
  // What has gone to the next rank.
  __device__ __forceinline__ const Words<4>& piece() const { return piece_; }

 private:
  __device__ __forceinline__ UnitPart part(uint32_t chunk, uint32_t unit, int peer) const {
    return part_of(p_, chunk, unit, p_.send_bytes[peer]);
  }
  __device__ __forceinline__ Words<4> load(int peer, const UnitPart& part) const {
    return load_piece<Case>(p_.send[peer], part, lane_);
  }

  const DirectParams& p_;
  const Lane& lane_;
  const int next_;
  Words<4> piece_;
  bool is_first_ = true;
};

// A chunk to the peers that take part in it: takes_part(peer). is_due(part, unit): see
// store_wide().
template <typename Case, typename TakesPart, typename IsDue>
__device__ __forceinline__ void send_chunk(const DirectParams& p, const LineState& state,
                                           Sender<Case>& sender, uint32_t chunk, uint32_t round,
                                           const TakesPart& takes_part, const IsDue& is_due) {
  for_units(p, [&](uint32_t unit) __attribute__((always_inline)) {
    sender.begin_unit(chunk, unit);
#pragma unroll
    for (int peer = 0; peer < Case::kMostRanks; ++peer) {
      if (peer >= size_of<Case>(p) || peer == p.rank || !takes_part(peer)) continue;
      sender.send(peer, chunk, unit, state.epoch[peer] + 1 + round,
                  [&](const UnitPart& part) { return is_due(part, unit); });
    }
  });
}

// The line of a pair of ranks that tells of the round itself, where neither need have anything for
// the other.
__device__ __forceinline__ bool is_line_due(const UnitPart& part, uint32_t unit, const Lane& lane) {
  return part.has_line(lane) || (unit == 0 && lane.line_at == 0);
}

// What all ranks have for this one's unit, in the order of ranks: own(), and what comes.
template <typename T, typename Case, typename GetOwn>
__device__ __forceinline__ Words<4> reduce_unit(const DirectParams& p, const LineState& state,
                                                const Lane& lane, uint32_t round, uint32_t unit,
                                                bool is_due, const GetOwn& own, bool& failed) {
  const auto from = [&](int source, uint32_t epoch) __attribute__((always_inline)) {
    return unit_of<Case>(p, p.rank, source, epoch, unit);
  };
  uint4 seen[Case::kMostRanks];
#pragma unroll
  for (int source = 0; source < Case::kMostRanks; ++source) {
    if (source >= size_of<Case>(p) || source == p.rank) continue;
    seen[source] = load_wide(from(source, state.epoch[source] + 1 + round), is_due);
  }
  const Words<4> mine = own();
  Accumulator<Case, T, 4> sum;
#pragma unroll
  for (int source = 0; source < Case::kMostRanks; ++source) {
    if (source >= size_of<Case>(p)) continue;
    Words<4> words = mine;
    if (source != p.rank) {
      const uint32_t epoch = state.epoch[source] + 1 + round;
      failed =
          await_wide(p, seen[source], from(source, epoch), source, lane, epoch, is_due) || failed;
      words = words_of(seen[source]);
    }
    if (source == 0) {
      sum.start(words);
    } else {
      sum.add(p.op, words);
    }
  }
  return sum.result(p.op, size_of<Case>(p));
}

// What the others have for this rank, to where it goes; between the first look and the waits
// meanwhile().
template <typename Case, typename Meanwhile>
__device__ __forceinline__ void receive_unit(const DirectParams& p, const LineState& state,
                                             const Lane& lane, uint32_t chunk, uint32_t round,
                                             uint32_t unit, Kind kind, const Meanwhile& meanwhile,
                                             bool& failed) {
  uint4 seen[Case::kMostRanks];
  // act(source, epoch, part, its unit, its line)
  const auto for_sources = [&](const auto& act) __attribute__((always_inline)) {
#pragma unroll
    for (int source = 0; source < Case::kMostRanks; ++source) {
      if (source >= size_of<Case>(p) || source == p.rank || chunk >= p.chunks[source]) continue;
      const uint32_t epoch = state.epoch[source] + 1 + round;
      act(source, epoch, part_of(p, chunk, unit, p.recv_bytes[source]),
          unit_of<Case>(p, p.rank, source, epoch, unit, kind), seen[source]);
    }
  };
  for_sources([&](int, uint32_t, const UnitPart& part, const char* from, uint4& line)
                  __attribute__((always_inline)) {
                    line = load_wide(from, is_line_due(part, unit, lane));
                  });
  meanwhile();
  for_sources([&](int source, uint32_t epoch, const UnitPart& part, const char* from, uint4& line)
                  __attribute__((always_inline)) {
                    const bool is_due = is_line_due(part, unit, lane);
                    failed = await_wide(p, line, from, source, lane, epoch, is_due) || failed;
                    store_piece<Case>(p.recv[source], part, lane, words_of(line));
                  });
}

}  // namespace torch_overlap::cuda::ll128
