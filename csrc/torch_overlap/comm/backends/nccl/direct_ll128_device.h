#pragma once

// Exchanges by lines of 128 bytes (after NCCL's protocol LL128): 120 of data, and the epoch of
// their round in the last word. Eight threads of a warp store a line by one instruction, and load
// it by one. Links carry such a store as a whole, and the cache of the owner takes and gives 128
// bytes at once, so that a load that sees the epoch has the data too. That is what GPUs behind
// NVLink do, and one GPU's own memory (DirectProblem::has_ll128), and no promise of the memory
// model's. Each warp does a unit of four lines in a round, and meets no other until it has done all
// of its rounds. For .cu files.
#include "torch_overlap/comm/backends/nccl/direct_line_device.h"

namespace torch_overlap::cuda::ll128 {

constexpr unsigned int kAll = ~0U;
constexpr int kLanesOfLine = G::kWideLineBytes / G::kVectorBytes;
static_assert(kWarp / kLanesOfLine * G::kWideLineBytes == G::kWideUnitBytes);
static_assert(G::kWideUnits * kWarp <= G::kThreads);
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

// This warp's unit of a chunk, of a message.
struct UnitPart {
  uint64_t begin;
  uint32_t bytes;  // that there are

  __device__ __forceinline__ bool has_line(const Lane& lane) const { return lane.line_at < bytes; }
  __device__ __forceinline__ bool has_data(const Lane& lane) const { return lane.at < bytes; }
};

__device__ __forceinline__ UnitPart part_of(const DirectParams& p, uint32_t chunk, uint64_t bytes) {
  const uint64_t unit = static_cast<uint64_t>(chunk) * p.chunk + warp_of_block();
  const uint64_t begin = unit * G::kWideUnitData;
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

// Where this warp's unit lies that `source` writes to `owner` in the round that makes the epoch
// `epoch`.
template <typename Case>
__device__ __forceinline__ char* unit_of(const DirectParams& p, int owner, int source,
                                         uint32_t epoch, Kind kind = Kind::parts) {
  const int size = size_of<Case>(p);
  const size_t slot = size_t{blockIdx.x} * G::kWideSlots + epoch % G::kWideSlots;
  const size_t of_kind = slot * G::wide_kinds(size) + static_cast<int>(kind);
  return p.base[owner] + p.wide_at + (of_kind * size + source) * DirectLayout::wide_of_one_rank() +
         warp_of_block() * G::kWideUnitBytes;
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

// A pair of ranks exchanges the first line of every unit, whether either has data for the other or
// not: it tells how far the other is (exchange_units).
__device__ __forceinline__ bool is_line_due(const UnitPart& part, const Lane& lane) {
  return part.has_line(lane) || lane.line_at == 0;
}

// What a warp sends, a unit to every peer in each round. It is loaded a round ahead where there are
// registers for that, and of the first round while the block still asks whether it may send.
template <typename Case>
class Sender {
  static constexpr bool kLoadsAhead = Case::kMostRanks <= 4;
  static constexpr int kPieces = kLoadsAhead ? Case::kMostRanks : 1;

 public:
  __device__ __forceinline__ Sender(const DirectParams& p, const Lane& lane) : p_(p), lane_(lane) {
    load(blockIdx.x);
  }

  __device__ __forceinline__ void send(const LineState& state, uint32_t chunk, uint32_t round) {
    if (!kLoadsAhead && round > 0) load(chunk);
    for_peers(chunk, [&](int peer) __attribute__((always_inline)) {
      const uint32_t epoch = state.epoch[peer] + 1 + round;
      store_wide(unit_of<Case>(p_, peer, p_.rank, epoch), piece_for(peer, chunk), lane_, epoch,
                 is_line_due(part(chunk, peer), lane_));
    });
    if (kLoadsAhead && chunk + gridDim.x < p_.most_chunks) load(chunk + gridDim.x);
  }
  // What was loaded last, where all peers get the same.
  __device__ __forceinline__ Words<4> piece() const { return pieces_[0]; }

 private:
  template <typename Act>
  __device__ __forceinline__ void for_peers(uint32_t chunk, const Act& act) const {
#pragma unroll
    for (int peer = 0; peer < Case::kMostRanks; ++peer) {
      if (peer >= size_of<Case>(p_) || peer == p_.rank || chunk >= p_.chunks[peer]) continue;
      act(peer);
    }
  }
  __device__ __forceinline__ UnitPart part(uint32_t chunk, int peer) const {
    return part_of(p_, chunk, p_.send_bytes[peer]);
  }
  __device__ __forceinline__ Words<4> load_for(int peer, uint32_t chunk) const {
    return load_piece<Case>(p_.send[peer], part(chunk, peer), lane_);
  }
  __device__ __forceinline__ Words<4> piece_for(int peer, uint32_t chunk) const {
    if constexpr (kLoadsAhead) return pieces_[peer];
    return p_.one_source ? pieces_[0] : load_for(peer, chunk);
  }
  __device__ __forceinline__ void load(uint32_t chunk) {
    if (p_.one_source) {
      const auto words = load_for(rank_after<Case>(p_, 1), chunk);
#pragma unroll
      for (auto& piece : pieces_) piece = words;
    } else if constexpr (kLoadsAhead) {
      for_peers(chunk, [&](int peer) __attribute__((always_inline)) {
        pieces_[peer] = load_for(peer, chunk);
      });
    }
  }

  const DirectParams& p_;
  const Lane& lane_;
  Words<4> pieces_[kPieces];  // by rank; one for all, if they get the same
};

// What all ranks have for this one's unit, in the order of ranks: own(), and what comes.
template <typename T, typename Case, typename GetOwn>
__device__ __forceinline__ Words<4> reduce_unit(const DirectParams& p, const LineState& state,
                                                const Lane& lane, uint32_t round, bool is_due,
                                                const GetOwn& own, bool& failed) {
  const auto from = [&](int source) __attribute__((always_inline)) {
    return unit_of<Case>(p, p.rank, source, state.epoch[source] + 1 + round);
  };
  uint4 seen[Case::kMostRanks];
#pragma unroll
  for (int source = 0; source < Case::kMostRanks; ++source) {
    if (source >= size_of<Case>(p) || source == p.rank) continue;
    seen[source] = load_wide(from(source), is_due);
  }
  const Words<4> mine = own();
  Accumulator<Case, T, 4> sum;
#pragma unroll
  for (int source = 0; source < Case::kMostRanks; ++source) {
    if (source >= size_of<Case>(p)) continue;
    Words<4> words = mine;
    if (source != p.rank) {
      const uint32_t epoch = state.epoch[source] + 1 + round;
      failed = await_wide(p, seen[source], from(source), source, lane, epoch, is_due) || failed;
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
                                             Kind kind, const Meanwhile& meanwhile, bool& failed) {
  uint4 seen[Case::kMostRanks];
  // act(source, epoch, part, its unit, its line)
  const auto for_sources = [&](const auto& act) __attribute__((always_inline)) {
#pragma unroll
    for (int source = 0; source < Case::kMostRanks; ++source) {
      if (source >= size_of<Case>(p) || source == p.rank || chunk >= p.chunks[source]) continue;
      const uint32_t epoch = state.epoch[source] + 1 + round;
      act(source, epoch, part_of(p, chunk, p.recv_bytes[source]),
          unit_of<Case>(p, p.rank, source, epoch, kind), seen[source]);
    }
  };
  for_sources(
      [&](int, uint32_t, const UnitPart& part, const char* from, uint4& line)
          __attribute__((always_inline)) { line = load_wide(from, is_line_due(part, lane)); });
  meanwhile();
  for_sources([&](int source, uint32_t epoch, const UnitPart& part, const char* from, uint4& line)
                  __attribute__((always_inline)) {
                    const bool is_due = is_line_due(part, lane);
                    failed = await_wide(p, line, from, source, lane, epoch, is_due) || failed;
                    store_piece<Case>(p.recv[source], part, lane, words_of(line));
                  });
}

// A round of a warp, and its chunk.
struct Round {
  uint32_t number = 0;
  uint32_t chunk = blockIdx.x;

  __device__ __forceinline__ void next() {
    ++number;
    chunk += gridDim.x;
  }
};

// A warp sends one round ahead of what it takes. When it sends that of round e it has taken those
// of e - 2, which the peers sent when they had taken all to e - 4, whose slots it writes to. So it
// is with the kernels before: by the end of the last one in which a block and a peer had rounds the
// peer's had begun it, so that it had ended all earlier ones, and of its rounds had taken all but
// the last two. Rounds 0 and 1 of the next kernel write to slots of those before these, and round 2
// goes out when the peer is in that kernel, too. take(round) -> whether a wait failed.
template <typename Case, typename Take>
__device__ __forceinline__ void exchange_units(const DirectParams& p, const LineState& state,
                                               Sender<Case>& sender, const Take& take) {
  bool failed = !may_send(p, state.entry);
  for (Round sent, taken; taken.chunk < p.most_chunks && !failed;) {
    if (sent.chunk < p.most_chunks && sent.number <= taken.number + 1) {
      sender.send(state, sent.chunk, sent.number);
      sent.next();
    } else {
      failed = take(taken);
      taken.next();
    }
  }
  end_lines<Case>(p, state);
}

// The same where what comes is answered, answer(round) -> whether a wait failed, and the answers of
// the others are taken. Parts go a round ahead of answers, and answers two ahead of what is taken:
// parts of round e go out when all answers to e - 4 are there, for which the peers have read the
// parts whose slots these write to; and an answer when all parts of its round are there, whose
// senders had taken the answers to e - 4.
template <typename Case, typename Answer, typename Take>
__device__ __forceinline__ void exchange_answered_units(const DirectParams& p,
                                                        const LineState& state,
                                                        Sender<Case>& sender, const Answer& answer,
                                                        const Take& take) {
  bool failed = !may_send(p, state.entry);
  for (Round sent, answered, taken; taken.chunk < p.most_chunks && !failed;) {
    if (sent.chunk < p.most_chunks && sent.number <= answered.number + 1) {
      sender.send(state, sent.chunk, sent.number);
      sent.next();
    } else if (answered.chunk < p.most_chunks && answered.number <= taken.number + 1) {
      failed = answer(answered);
      answered.next();
    } else {
      failed = take(taken);
      taken.next();
    }
  }
  end_lines<Case>(p, state);
}

}  // namespace torch_overlap::cuda::ll128
