#pragma once

// Exchanges by bulk copies: chunks go from a rank's tensor through shared memory to its peers, and
// what comes goes through shared memory to where it belongs. A thread for each peer and direction
// does nothing but start copies and tell of those that have ended, so a few blocks fill the links.
//
//   sender of a peer        tensor -> stage -> slot of the peer
//   forwarder of a source   flag, slot -> stage -> tensor
//   taker of a source       flag, slot (of this rank: tensor) -> its part of a stage
//   adders, four warps      parts of a stage -> sum -> tensor; by two shots also slot of each peer
//   teller, a warp          copies that have ended: flags of the peers
//
//   copy       senders, forwarders
//   reduce     senders, takers, adders
//   two shots  senders of slices, takers, adders, forwarders of sums
//
// A sender is kAhead rounds ahead, at most, of what has come from its peer. So what tells this rank
// of round r of a peer says that the peer has emptied the slot of round r - kAhead, and the slots
// of twice as many rounds are enough. What two shots send of a round are sums of what was sent to
// their owner, who has emptied the slot before: there as many slots as rounds ahead would do.
//
// A flag stands behind a fence, which takes long while copies are on their way. So those who copy
// leave flags to a warp that copies nothing. For .cu files.
#include <algorithm>
#include <cstring>

#include "torch_overlap/comm/backends/nccl/direct_device.h"
#include "torch_overlap/common/cuda/hopper_device.h"

namespace torch_overlap::cuda::bulk {

using sm90::barrier_arrive;
using sm90::barrier_expect;
using sm90::barrier_wait;
using sm90::bulk_load;
using sm90::bulk_store;
using sm90::shared_address;
using sm90::store_commit;
using sm90::stores_done;
using sm90::stores_read;

inline constexpr uint32_t kAhead = G::kBulkAhead;
inline constexpr uint32_t kSlots = G::kBulkSlots;
// Rounds of stores that are under way when another follows: more wait for each other in the links,
// and the fences for them.
inline constexpr int kFlying = 2;
inline constexpr int kAdders = 128;  // threads
inline constexpr int kVectorBytes = G::kVectorBytes;
// Of slots, for the reasons above; and a flag may be up to 2 kAhead - 1 rounds past the one
// awaited.
static_assert(kSlots >= 2 * kAhead);

enum class Shape : uint8_t { copy, reduce, two_shot };
enum Kind : int { kParts, kSums };

// How many stages each role has.
template <Shape kShape>
constexpr int kSendStages = kShape == Shape::two_shot ? 2 : 3;
template <Shape kShape>
constexpr int kForwardStages = kShape == Shape::copy ? 4 : 2;
template <Shape kShape>
constexpr int kAddStages = kShape == Shape::two_shot ? 3 : 4;
inline constexpr int kMostStages = 4;

constexpr bool has_forwarders(Shape shape) { return shape != Shape::reduce; }
constexpr bool has_adders(Shape shape) { return shape != Shape::copy; }

struct BulkShared {
  BlockState state;
  uint64_t sent[G::kMostRanks][kMostStages];       // a sender's stage is full
  uint64_t forwarded[G::kMostRanks][kMostStages];  // a forwarder's stage is full
  uint64_t filled[kMostStages];                    // by the takers
  uint64_t emptied[kMostStages];                   // by the adders
  uint32_t loaded[G::kMostRanks];                  // rounds that a sender has read of the tensor
  uint32_t taken[G::kMostRanks];  // rounds whose slot is empty, or by two shots that of the sums
  uint32_t arrived[2][G::kMostRanks];  // rounds of each kind that are in the peer's memory
  uint32_t last_ones;                  // of how many peers the last round has come
  // All go on, so that every copy is waited for, but nothing is sent, written or told any more.
  uint32_t failed;
};

// By all threads, which meet before they use it.
__device__ __forceinline__ void init_shared(BulkShared& shared, int size) {
  if (threadIdx.x != 0) return;
  for (int rank = 0; rank < size; ++rank) {
    for (int stage = 0; stage < kMostStages; ++stage) {
      sm90::barrier_init(shared_address(&shared.sent[rank][stage]), 1);
      sm90::barrier_init(shared_address(&shared.forwarded[rank][stage]), 1);
    }
    shared.loaded[rank] = 0;
    shared.taken[rank] = 0;
    shared.arrived[kParts][rank] = 0;
    shared.arrived[kSums][rank] = 0;
  }
  for (int stage = 0; stage < kMostStages; ++stage) {
    sm90::barrier_init(shared_address(&shared.filled[stage]), size);
    sm90::barrier_init(shared_address(&shared.emptied[stage]), 1);
  }
  shared.last_ones = 0;
  shared.failed = 0;
  sm90::fence_barrier_init();
}

// Calls body(p) in code for sm_90 and newer: what a build for older GPUs has of a kernel is empty.
template <typename Body>
__device__ __forceinline__ void where_there_are_bulk_copies(const Body& body,
                                                            const DirectParams& p) {
#if __CUDA_ARCH__ >= 900
  body(p);
#endif
}

struct Piece {
  const char* from;
  uint32_t bytes;  // 0: nothing is left
};

struct Block {
  const DirectParams& p;
  BulkShared& shared;
  uint32_t stage_bytes;  // a chunk

  __device__ __forceinline__ uint64_t place(uint32_t round) const {
    return uint64_t{blockIdx.x + round * gridDim.x} * stage_bytes;
  }
  __device__ __forceinline__ uint32_t length(uint64_t at, uint64_t all) const {
    return at < all ? static_cast<uint32_t>(min(uint64_t{stage_bytes}, all - at)) : 0;
  }
  __device__ __forceinline__ uint32_t rounds() const {
    return p.most_chunks > blockIdx.x ? (p.most_chunks - blockIdx.x - 1) / gridDim.x + 1 : 0;
  }
  __device__ __forceinline__ uint32_t epoch(int peer, uint32_t round) const {
    return shared.state.epoch[peer] + 1 + round;
  }
  // What `source` writes to `owner`.
  __device__ __forceinline__ char* slot(int owner, int source, Kind kind, uint32_t epoch) const {
    const size_t kinds = G::bulk_kinds(p.size);
    const size_t index = (size_t{blockIdx.x} * kSlots + epoch % kSlots) * kinds + kind;
    const size_t part = index * (p.size - 1) + (source < owner ? source : source - 1);
    return p.base[owner] + p.bulk_at + part * G::bulk_bytes(p.size);
  }
  // The epoch of the last round that `source` has written to `owner`. Beside the flag of pushes,
  // who wait for another word: they take one that is four rounds ahead or more for an old one.
  __device__ __forceinline__ uint32_t* flag(int owner, int source, Kind kind) const {
    return flag_of(p, 0, owner, source) + 1 + kind;
  }
  __device__ __forceinline__ bool has_failed() const {
    return *static_cast<const volatile uint32_t*>(&shared.failed) != 0;
  }
  __device__ __forceinline__ void fail() const {
    *static_cast<volatile uint32_t*>(&shared.failed) = 1;
  }
  __device__ __forceinline__ void await(const uint32_t& word, uint32_t rounds) const {
    while (sm90::noted(word) < rounds && !has_failed()) __nanosleep(20);
  }
  // The last round of a peer is there, or there is none. Once that is so of all, whomever this
  // block still waits for runs, and the next kernel may come. Before, one of this kind would hold
  // SMs while it waits, one for a block, as it does behind the small kernels, which let it come at
  // once.
  __device__ __forceinline__ void has_last_of_peer() const {
    if (atomicAdd_block(&shared.last_ones, 1) + 2 == p.size) let_next_kernel_launch();
  }
};

// Flags of a source. One look may tell of more than one round.
class Arrivals {
 public:
  __device__ __forceinline__ Arrivals(const Block& block, int source, Kind kind)
      : block_(block), source_(source), kind_(kind) {}
  __device__ __forceinline__ bool has(uint32_t round) {
    if (round < rounds_) return true;
    const uint32_t expected = block_.epoch(source_, round);
    const uint32_t seen = load_acquire(flag());
    if (!is_there(seen, expected, kSlots)) return false;
    rounds_ = round + 1 + (seen - expected);
    return true;
  }
  // Returns when it is there, or nothing counts any more.
  __device__ __forceinline__ void await(uint32_t round) {
    for (int looks = 1; !block_.has_failed() && !has(round); ++looks) {
      if (looks % kLooks != 0) continue;
      const uint32_t expected = block_.epoch(source_, round);
      if (!wait_long(block_.p, flag(), source_, expected, kSlots)) block_.fail();
    }
  }

 private:
  __device__ __forceinline__ const uint32_t* flag() const {
    return block_.flag(block_.p.rank, source_, kind_);
  }

  const Block& block_;
  const int source_;
  const Kind kind_;
  uint32_t rounds_ = 0;
};

// --- Roles, of one thread each -------------------------------------------------------------------

// Calls note(rounds) for the last kLeft + 1 rounds, one by one.
template <int kLeft, typename Note>
__device__ __forceinline__ void note_rest(uint32_t rounds, const Note& note) {
  stores_done<kLeft>();
  if (rounds > kLeft) note(rounds - kLeft);
  if constexpr (kLeft > 0) note_rest<kLeft - 1>(rounds, note);
}

// piece(round): what goes to the peer.
template <int kStages, typename GetPiece>
__device__ __forceinline__ void send(const Block& block, int peer, uint32_t stages,
                                     const GetPiece& piece) {
  const DirectParams& p = block.p;
  BulkShared& shared = block.shared;
  const uint32_t rounds = rounds_with(p, peer);
  const uint32_t barriers = shared_address(shared.sent[peer]);
  bool is_good = true;  // all rounds so far are sent
  const auto note_arrived = [&](uint32_t rounds_before) {
    if (is_good) sm90::note(shared.arrived[kParts][peer], rounds_before);
  };
  const auto load = [&](uint32_t round) {
    if (round >= rounds) return;
    const Piece next = piece(round);
    const uint32_t stage = round % kStages;
    barrier_expect(barriers + stage * 8, next.bytes);
    if (next.bytes > 0) {
      bulk_load(stages + stage * block.stage_bytes, next.from, next.bytes, barriers + stage * 8);
    }
  };
#pragma unroll
  for (int round = 0; round < kStages - 1; ++round) load(round);
  for (uint32_t round = 0; round < rounds; ++round) {
    if (round >= kAhead) {
      if (sm90::noted(shared.taken[peer]) < round + 1 - kAhead) {
        // The peer may be waiting for what it has not been told of.
        stores_done<0>();
        note_arrived(round);
        block.await(shared.taken[peer], round + 1 - kAhead);
      }
      sm90::fence_global_for_copies();
    }
    const uint32_t stage = round % kStages;
    barrier_wait(barriers + stage * 8, round / kStages % 2);
    sm90::note(shared.loaded[peer], round + 1);
    const uint32_t bytes = piece(round).bytes;
    is_good = is_good && !block.has_failed();
    if (bytes > 0 && is_good) {
      bulk_store(block.slot(peer, p.rank, kParts, block.epoch(peer, round)),
                 stages + stage * block.stage_bytes, bytes);
    }
    store_commit();
    if (round >= kFlying) {
      stores_done<kFlying>();
      note_arrived(round + 1 - kFlying);
    }
    stores_read<1>();
    load(round + kStages - 1);
  }
  note_rest<kFlying - 1>(rounds, note_arrived);
}

// place(round): what comes goes there. From this rank itself: own(round).
template <int kStages, typename GetPlace, typename GetOwn>
__device__ __forceinline__ void forward(const Block& block, int source, Kind kind, uint32_t rounds,
                                        uint32_t stages, const GetPlace& place, const GetOwn& own) {
  constexpr int kLag = std::max(kStages - 2, 1);  // rounds whose loads are under way
  const DirectParams& p = block.p;
  BulkShared& shared = block.shared;
  const uint32_t barriers = shared_address(shared.forwarded[source]);
  Arrivals arrivals(block, source, kind);
  uint32_t ended = 0;
  const auto end_before = [&](uint32_t round) {
    for (; ended < round; ++ended) {
      const uint32_t stage = ended % kStages;
      barrier_wait(barriers + stage * 8, ended / kStages % 2);
      sm90::note(shared.taken[source], ended + 1);
      const Piece to = place(ended);
      if (to.bytes > 0 && !block.has_failed()) {
        bulk_store(const_cast<char*>(to.from), stages + stage * block.stage_bytes, to.bytes);
      }
      store_commit();
    }
  };
  for (uint32_t round = 0; round < rounds; ++round) {
    if (source != p.rank) {
      if (!arrivals.has(round)) end_before(round);
      arrivals.await(round);
    }
    // All but the last kLag rounds have ended: of their stores, those up to round - kStages have to
    // have been read, and at least kStages - kLag - 1 came behind.
    if (round >= kStages) stores_read<kStages - kLag - 1>();
    const uint32_t stage = round % kStages;
    const uint32_t bytes = place(round).bytes;
    if (bytes == 0 || block.has_failed()) {
      barrier_arrive(barriers + stage * 8);
    } else {
      sm90::fence_global_for_copies();
      barrier_expect(barriers + stage * 8, bytes);
      const char* const from = source == p.rank
                                   ? own(round)
                                   : block.slot(p.rank, source, kind, block.epoch(source, round));
      bulk_load(stages + stage * block.stage_bytes, from, bytes, barriers + stage * 8);
    }
    if (round >= kLag) end_before(round + 1 - kLag);
  }
  if (source != p.rank) block.has_last_of_peer();
  end_before(rounds);
  stores_done<0>();
}

// Fills the source's part of each stage. own(round): this rank's.
template <int kStages, bool kIsLast, typename GetOwn>
__device__ __forceinline__ void take(const Block& block, int source, uint32_t stages,
                                     const GetOwn& own) {
  const DirectParams& p = block.p;
  BulkShared& shared = block.shared;
  const uint32_t rounds = block.rounds();
  const uint32_t filled = shared_address(shared.filled);
  const uint32_t emptied = shared_address(shared.emptied);
  const uint32_t part = stages + source * block.stage_bytes;
  Arrivals arrivals(block, source, kParts);
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint32_t stage = round % kStages;
    if (round >= kStages) barrier_wait(emptied + stage * 8, (round / kStages - 1) % 2);
    const Piece mine = own(round);  // all ranks' are as long
    const char* from = mine.from;
    if (source != p.rank) {
      arrivals.await(round);
      from = block.slot(p.rank, source, kParts, block.epoch(source, round));
      sm90::fence_global_for_copies();
    }
    if (mine.bytes == 0 || block.has_failed()) {
      barrier_arrive(filled + stage * 8);
    } else {
      barrier_expect(filled + stage * 8, mine.bytes);
      bulk_load(part + stage * p.size * block.stage_bytes, from, mine.bytes, filled + stage * 8);
    }
  }
  if (kIsLast && source != p.rank) block.has_last_of_peer();
}

// --- Adders --------------------------------------------------------------------------------------

__device__ __forceinline__ Words<4> load_shared(uint32_t address) {
  Words<4> out;
  const uint4 all = sm90::load_vector(address);
  std::memcpy(out.at, &all, sizeof(all));
  return out;
}

// In the order of ranks, over the part of rank 0.
template <typename T, typename Case>
__device__ __forceinline__ void add_up(const DirectParams& p, uint32_t parts, uint32_t stage_bytes,
                                       uint32_t bytes, int thread) {
  for (uint32_t at = thread * kVectorBytes; at < bytes; at += kAdders * kVectorBytes) {
    Words<4> seen[Case::kMostRanks];
#pragma unroll
    for (int source = 0; source < Case::kMostRanks; ++source) {
      if (source >= size_of<Case>(p)) continue;
      seen[source] = load_shared(parts + source * stage_bytes + at);
    }
    const auto sum = accumulate<T, Case>(p, seen).result(p.op, size_of<Case>(p));
    sm90::store_vector(parts + at, uint4{sum.at[0], sum.at[1], sum.at[2], sum.at[3]});
  }
}

// out(round): where the sum goes. kSends: and to all peers.
template <typename T, typename Case, Shape kShape, typename GetPlace>
__device__ __forceinline__ void add(const Block& block, int thread, uint32_t stages,
                                    const GetPlace& out) {
  constexpr int kStages = kAddStages<kShape>;
  constexpr bool kSends = kShape == Shape::two_shot;
  const DirectParams& p = block.p;
  BulkShared& shared = block.shared;
  const uint32_t rounds = block.rounds();
  const uint32_t filled = shared_address(shared.filled);
  const uint32_t emptied = shared_address(shared.emptied);
  bool is_good = true;  // of thread 0: all rounds so far are added up, and sent
  const auto note_arrived = [&](uint32_t rounds_before) {
    if (!is_good) return;
    for (int peer = 0; peer < p.size; ++peer) {
      sm90::note(shared.arrived[kSums][peer], rounds_before);
    }
  };
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint32_t stage = round % kStages;
    const uint32_t parts = stages + stage * p.size * block.stage_bytes;
    barrier_wait(filled + stage * 8, round / kStages % 2);
    if (!kSends && thread < p.size) sm90::note(shared.taken[thread], round + 1);
    const Piece to = out(round);
    if (to.bytes > 0 && !block.has_failed()) {
      add_up<T, Case>(p, parts, block.stage_bytes, to.bytes, thread);
    }
    sm90::fence_shared_for_copies();
    sm90::meet_threads(1, kAdders);
    if (thread >= kWarp) continue;
    if (thread == 0) {
      is_good = is_good && !block.has_failed();  // so no thread has found that it has, either
      if (to.bytes > 0 && is_good) {
        bulk_store(const_cast<char*>(to.from), parts, to.bytes);
        if constexpr (kSends) {
          for (int k = 1; k < p.size; ++k) {
            const int peer = rank_after<Case>(p, k);
            bulk_store(block.slot(peer, p.rank, kSums, block.epoch(peer, round)), parts, to.bytes);
          }
        }
      }
      store_commit();
      if constexpr (kSends) {
        stores_done<1>();
        note_arrived(round);
      } else {
        stores_read<1>();
      }
      if (round > 0) barrier_arrive(emptied + (round - 1) % kStages * 8);
    }
  }
  if (thread != 0) return;
  stores_done<0>();
  if constexpr (kSends) note_arrived(rounds);
}

// --- Teller --------------------------------------------------------------------------------------

// A warp, of which a lane speaks with each peer, and of each kind of data.
template <int kKinds>
__device__ __forceinline__ void tell(const Block& block, int lane) {
  constexpr unsigned int kAll = ~0U;
  static_assert(kKinds * G::kMostRanks <= kWarp);
  const DirectParams& p = block.p;
  const auto kind = static_cast<Kind>(lane / G::kMostRanks);
  const int peer = lane % G::kMostRanks;
  const bool is_needed = kind < kKinds && peer < p.size && peer != p.rank;
  const uint32_t rounds = is_needed ? rounds_with(p, peer) : 0;
  uint32_t told = 0;
  while (__any_sync(kAll, told < rounds) && !__any_sync(kAll, block.has_failed())) {
    const uint32_t arrived = told < rounds ? sm90::noted(block.shared.arrived[kind][peer]) : told;
    if (arrived > told) {
      store_release(block.flag(peer, p.rank, kind), block.epoch(peer, arrived - 1));
      told = arrived;
    } else {
      __nanosleep(20);
    }
    __syncwarp();
  }
}

}  // namespace torch_overlap::cuda::bulk
