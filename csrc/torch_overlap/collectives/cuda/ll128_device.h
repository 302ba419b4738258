#pragma once

// LL128 exchanges (after NCCL's protocol): lines of 128 bytes, with 120 bytes of data and the epoch
// of the round in the last word. Eight threads of a warp store a line with one instruction, and
// load it with one. Links carry such a store as a whole, and the owner's cache reads and writes 128
// bytes at once, so a load that sees the epoch also sees the data. GPUs connected by NVLink behave
// this way, and so does one GPU's own memory (CollectiveProblem::has_ll128); the memory model does
// not promise it. Each warp processes a unit of four lines per round, and does not synchronize with
// other warps until it has completed all of its rounds. For .cu files.
#include "torch_overlap/collectives/cuda/ll_device.h"

namespace torch_overlap::cuda::ll128 {

constexpr unsigned int kAll = ~0U;
constexpr int kLanesPerLine = G::kLL128LineBytes / G::kVectorBytes;
static_assert(kWarp / kLanesPerLine * G::kLL128LineBytes == G::kLL128UnitBytes);
static_assert(G::kLL128Units * kWarp <= G::kThreads);
// Leaves room for the kernels of two communicators with max_ll128_blocks() each on 128 SMs, as
// kMinBlocksPerSm does for other kernels on fewer SMs. With registers for four blocks per SM, sums
// of two ranks would spill.
template <typename Case>
inline constexpr int kLL128BlocksPerSm = Case::kMaxRanks == 2 ? 3 : 2;

__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ uint32_t warp_of_block() { return threadIdx.x / kWarp; }

// Piece of a unit (four lines) that this lane carries: 16 bytes, or 8 bytes next to the epoch. The
// data of every other line begins with the short piece, so that all other pieces are aligned to
// vectors within a unit.
struct Lane {
  uint32_t line_at;  // offset in bytes of the line's data in the unit; `at`: of the piece
  uint32_t at;
  bool is_short;
};

__device__ __forceinline__ Lane this_lane() {
  const int line = lane_of_warp() / kLanesPerLine;
  const int place = lane_of_warp() % kLanesPerLine;
  const bool is_short = place == kLanesPerLine - 1;
  const int in_line = line % 2 == 0 ? place * G::kVectorBytes
                      : is_short    ? 0
                                    : place * G::kVectorBytes + G::kVectorBytes / 2;
  const auto line_at = static_cast<uint32_t>(line * G::kLL128LineData);
  return {line_at, line_at + in_line, is_short};
}

// This warp's unit of a chunk of a message.
struct UnitPart {
  uint64_t begin;
  uint32_t bytes;  // number of bytes that the message has in the unit

  __device__ __forceinline__ bool has_line(const Lane& lane) const { return lane.line_at < bytes; }
  __device__ __forceinline__ bool has_data(const Lane& lane) const { return lane.at < bytes; }
};

__device__ __forceinline__ UnitPart part_of(const CollectiveParams& p, uint32_t chunk,
                                            uint64_t bytes) {
  const uint64_t unit = static_cast<uint64_t>(chunk) * p.chunk + warp_of_block();
  const uint64_t begin = unit * G::kLL128UnitData;
  const uint64_t left = begin < bytes ? bytes - begin : 0;
  return {begin, static_cast<uint32_t>(min(left, uint64_t{G::kLL128UnitData}))};
}

// Loads this lane's piece of a part of `message`; zeros if it has none.
template <typename Case>
__device__ __forceinline__ Words<4> load_piece(const char* message, const UnitPart& part,
                                               const Lane& lane) {
  Words<4> out{};
  if (!part.has_data(lane)) return out;
  const char* const from = message + part.begin + lane.at;
  if (!lane.is_short) return load_words<Case, 4>(from, part.bytes - lane.at);
  if constexpr (Case::kIsAligned) {
    const uint2 both = *reinterpret_cast<const uint2*>(from);
    out.at[0] = both.x;
    out.at[1] = both.y;
  } else {
    const auto both = load_unaligned<2>(from, part.bytes - lane.at);
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
  if constexpr (Case::kIsAligned) {
    *reinterpret_cast<uint2*>(to) = uint2{words.at[0], words.at[1]};
  } else {
    store_unaligned<2>(to, {{words.at[0], words.at[1]}}, part.bytes - lane.at);
  }
}

enum class Kind : int { parts, sums };

// Returns the slot of this warp's unit that `source` writes to `owner` in the round with this
// epoch.
template <typename Case>
__device__ __forceinline__ char* ll128_slot_of(const CollectiveParams& p, int owner, int source,
                                               uint32_t epoch, Kind kind = Kind::parts) {
  const int size = size_of<Case>(p);
  const size_t slot = size_t{blockIdx.x} * G::kLL128Slots + epoch % G::kLL128Slots;
  const size_t of_kind = slot * G::ll128_kinds(size) + static_cast<int>(kind);
  return p.base[owner] + p.ll128_offset +
         (of_kind * size + source) * CollectiveLayout::ll128_bytes_per_rank() +
         warp_of_block() * G::kLL128UnitBytes;
}

// Called by a whole warp, as are all functions below. `is_due` is equal on all lanes of a line.
__device__ __forceinline__ void store_ll128(char* unit, const Words<4>& words, const Lane& lane,
                                            uint32_t epoch, bool is_due) {
  __syncwarp();
  if (!is_due) return;
  store_ll(unit + lane_of_warp() * G::kVectorBytes,
           uint4{words.at[0], words.at[1], words.at[2], lane.is_short ? epoch : words.at[3]});
}
__device__ __forceinline__ uint4 load_ll128(const char* unit, bool is_due) {
  __syncwarp();
  uint4 line{};
  if (is_due) line = load_ll(static_cast<const void*>(unit + lane_of_warp() * G::kVectorBytes));
  return line;
}

// Waits for lines. `missing` has a bit set for the last lane of each. Returns true, on all lanes,
// if a line never arrived. A different one of the first lanes polls each line; two of these lanes
// poll the host's word often (wait_slow_path).
static __device__ __noinline__ bool wait_for_lines(const CollectiveParams& p, const char* unit,
                                                   int source, uint32_t epoch, uint32_t missing) {
  bool failed = false;
  const int line = lane_of_warp();
  if (line < kWarp / kLanesPerLine && (missing >> (line * kLanesPerLine + kLanesPerLine - 1) & 1)) {
    const char* const end = unit + (line + 1) * G::kLL128LineBytes;
    failed = !wait_slow_path(p, reinterpret_cast<const uint32_t*>(end) - 1, source, epoch, 1);
  }
  return __any_sync(kAll, failed) != 0;
}

// Reloads `line` until it carries `epoch`. Returns true, on all lanes, if it never did.
__device__ __forceinline__ bool await_ll128(const CollectiveParams& p, uint4& line,
                                            const char* unit, int source, const Lane& lane,
                                            uint32_t epoch, bool is_due) {
  for (int spins = 1;; ++spins) {
    const uint32_t missing = __ballot_sync(kAll, is_due && lane.is_short && line.w != epoch);
    if (missing == 0) return false;
    if (spins % kSpinsBeforeCheck == 0 && wait_for_lines(p, unit, source, epoch, missing))
      return true;
    line = load_ll128(unit, is_due);
  }
}

__device__ __forceinline__ Words<4> packet_data(const uint4& line) {
  return {{line.x, line.y, line.z, line.w}};
}

// Returns true if the line is exchanged. A pair of ranks exchanges the first line of every unit,
// whether or not either has data for the other: it shows the progress of the sender
// (exchange_units).
__device__ __forceinline__ bool is_ll_due(const UnitPart& part, const Lane& lane) {
  return part.has_line(lane) || lane.line_at == 0;
}

// Sends one unit to every peer in each round. The data is loaded one round ahead if there are
// enough registers, and for the first round while the block still checks whether it may send.
template <typename Case>
class Sender {
  static constexpr bool kLoadsAhead = Case::kMaxRanks <= 4;
  static constexpr int kPieces = kLoadsAhead ? Case::kMaxRanks : 1;

 public:
  __device__ __forceinline__ Sender(const CollectiveParams& p, const Lane& lane)
      : p_(p), lane_(lane) {
    load(blockIdx.x);
  }

  __device__ __forceinline__ void send(const LLState& state, uint32_t chunk, uint32_t round) {
    if (!kLoadsAhead && round > 0) load(chunk);
    for_peers(chunk, [&](int peer) __attribute__((always_inline)) {
      const uint32_t epoch = state.epoch[peer] + 1 + round;
      store_ll128(ll128_slot_of<Case>(p_, peer, p_.rank, epoch), piece_for(peer, chunk), lane_,
                  epoch, is_ll_due(part(chunk, peer), lane_));
    });
    if (kLoadsAhead && chunk + gridDim.x < p_.max_chunks) load(chunk + gridDim.x);
  }
  // Returns the piece that was loaded last. Valid if all peers get the same data.
  __device__ __forceinline__ Words<4> piece() const { return pieces_[0]; }

 private:
  template <typename Act>
  __device__ __forceinline__ void for_peers(uint32_t chunk, const Act& act) const {
#pragma unroll
    for (int peer = 0; peer < Case::kMaxRanks; ++peer) {
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
    return p_.has_single_source ? pieces_[0] : load_for(peer, chunk);
  }
  __device__ __forceinline__ void load(uint32_t chunk) {
    if (p_.has_single_source) {
      const auto words = load_for(rank_after<Case>(p_, 1), chunk);
#pragma unroll
      for (auto& piece : pieces_) piece = words;
    } else if constexpr (kLoadsAhead) {
      for_peers(chunk, [&](int peer) __attribute__((always_inline)) {
        pieces_[peer] = load_for(peer, chunk);
      });
    }
  }

  const CollectiveParams& p_;
  const Lane& lane_;
  Words<4> pieces_[kPieces];  // by rank; all equal if the peers get the same data
};

// Combines all ranks' data of this rank's unit in rank order: own(), and the received units. The
// words of a short piece after its data are undefined.
template <typename T, typename Case, typename GetOwn>
__device__ __forceinline__ Accumulator<Case, T, 4> combine_unit(const CollectiveParams& p,
                                                                const LLState& state,
                                                                const Lane& lane, uint32_t round,
                                                                bool is_due, const GetOwn& own,
                                                                bool& failed) {
  const auto from = [&](int source) __attribute__((always_inline)) {
    return ll128_slot_of<Case>(p, p.rank, source, state.epoch[source] + 1 + round);
  };
  uint4 seen[Case::kMaxRanks];
#pragma unroll
  for (int source = 0; source < Case::kMaxRanks; ++source) {
    if (source >= size_of<Case>(p) || source == p.rank) continue;
    seen[source] = load_ll128(from(source), is_due);
  }
  const Words<4> mine = own();
  Accumulator<Case, T, 4> sum;
#pragma unroll
  for (int source = 0; source < Case::kMaxRanks; ++source) {
    if (source >= size_of<Case>(p)) continue;
    Words<4> words = mine;
    if (source != p.rank) {
      const uint32_t epoch = state.epoch[source] + 1 + round;
      failed = await_ll128(p, seen[source], from(source), source, lane, epoch, is_due) || failed;
      words = packet_data(seen[source]);
    }
    if (source == 0) {
      sum.start(words);
    } else {
      sum.add(p.op, words);
    }
  }
  return sum;
}

template <typename T, typename Case, typename GetOwn>
__device__ __forceinline__ Words<4> reduce_unit(const CollectiveParams& p, const LLState& state,
                                                const Lane& lane, uint32_t round, bool is_due,
                                                const GetOwn& own, bool& failed) {
  auto sum = combine_unit<T, Case>(p, state, lane, round, is_due, own, failed);
  return sum.result(p.op, size_of<Case>(p));
}

// Stores the data that the other ranks have for this one at its destination. Calls meanwhile()
// between the first loads and the waits.
template <typename Case, typename Meanwhile>
__device__ __forceinline__ void receive_unit(const CollectiveParams& p, const LLState& state,
                                             const Lane& lane, uint32_t chunk, uint32_t round,
                                             Kind kind, const Meanwhile& meanwhile, bool& failed) {
  uint4 seen[Case::kMaxRanks];
  // Calls act(source, epoch, part, slot of the unit, line) for every source.
  const auto for_sources = [&](const auto& act) __attribute__((always_inline)) {
#pragma unroll
    for (int source = 0; source < Case::kMaxRanks; ++source) {
      if (source >= size_of<Case>(p) || source == p.rank || chunk >= p.chunks[source]) continue;
      const uint32_t epoch = state.epoch[source] + 1 + round;
      act(source, epoch, part_of(p, chunk, p.recv_bytes[source]),
          ll128_slot_of<Case>(p, p.rank, source, epoch, kind), seen[source]);
    }
  };
  for_sources(
      [&](int, uint32_t, const UnitPart& part, const char* from, uint4& line)
          __attribute__((always_inline)) { line = load_ll128(from, is_ll_due(part, lane)); });
  meanwhile();
  for_sources([&](int source, uint32_t epoch, const UnitPart& part, const char* from, uint4& line)
                  __attribute__((always_inline)) {
                    const bool is_due = is_ll_due(part, lane);
                    failed = await_ll128(p, line, from, source, lane, epoch, is_due) || failed;
                    store_piece<Case>(p.recv[source], part, lane, packet_data(line));
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

// A warp sends one round ahead of the round that it receives. When it sends round e, it has
// received the rounds up to e - 2. The peers sent these after they had received all rounds up to
// e - 4, whose slots this warp overwrites. The same holds across kernels: by the end of the last
// kernel in which a block and a peer had rounds, the peer's block had begun that kernel. It had
// therefore ended all earlier ones, and of the rounds of that kernel it had received all but the
// last two. Rounds 0 and 1 of the next kernel write to slots of rounds before these two; round 2 is
// sent when the peer is in that kernel, too. take(round) returns true if a wait failed.
template <typename Case, typename Take>
__device__ __forceinline__ void exchange_units(const CollectiveParams& p, const LLState& state,
                                               Sender<Case>& sender, const Take& take) {
  bool failed = !try_enter(p, state.entry);
  for (Round sent, taken; taken.chunk < p.max_chunks && !failed;) {
    if (sent.chunk < p.max_chunks && sent.number <= taken.number + 1) {
      sender.send(state, sent.chunk, sent.number);
      sent.next();
    } else {
      failed = take(taken);
      taken.next();
    }
  }
  end_ll<Case>(p, state);
}

// The same if received parts are answered, and the answers of the others are received.
// answer(round) returns true if a wait failed. Parts of round e are sent once round e - 2 is
// answered, and round e is answered once the answers of round e - 2 are received. Parts of round e
// are thus sent after all answers up to round e - 4 have arrived, and the peers had read the parts
// whose slots these overwrite before they sent those answers. An answer of round e is sent when all
// parts of that round have arrived, whose senders had received the answers up to e - 4.
template <typename Case, typename Answer, typename Take>
__device__ __forceinline__ void exchange_answered_units(const CollectiveParams& p,
                                                        const LLState& state, Sender<Case>& sender,
                                                        const Answer& answer, const Take& take) {
  bool failed = !try_enter(p, state.entry);
  for (Round sent, answered, taken; taken.chunk < p.max_chunks && !failed;) {
    if (sent.chunk < p.max_chunks && sent.number <= answered.number + 1) {
      sender.send(state, sent.chunk, sent.number);
      sent.next();
    } else if (answered.chunk < p.max_chunks && answered.number <= taken.number + 1) {
      failed = answer(answered);
      answered.next();
    } else {
      failed = take(taken);
      taken.next();
    }
  }
  end_ll<Case>(p, state);
}

}  // namespace torch_overlap::cuda::ll128
