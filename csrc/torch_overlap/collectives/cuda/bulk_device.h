#pragma once

// Exchanges by bulk copies. A chunk goes from a rank's tensor through shared memory to its peers,
// and a received chunk goes through shared memory to its destination. One thread per peer and
// direction only starts copies and reports those that have completed, so a few blocks saturate the
// links.
//
//   sender of a peer, send()          tensor -> stage -> slot of the peer
//   forwarder of a source, forward()  flag, slot -> stage -> tensor
//   loader of a source, take()        flag, slot (of this rank: tensor) -> its part of a stage
//   reducers, add(), four warps       parts of a stage -> sum -> tensor; two-shot: and peers' slots
//   notifier, signal_peers(), a warp  completed copies -> flags of the peers
//
//   copy      senders, forwarders
//   reduce    senders, loaders, reducers
//   two-shot  senders of slices, loaders, reducers, forwarders of sums
//
// A rank sends round r to a peer after it has emptied the slot of the peer's
// round r - kMaxRoundsAhead, so a sender is at most kMaxRoundsAhead rounds ahead of the rounds that
// have arrived from its peer. The flag of round r of a peer therefore implies that the peer has
// emptied the slot of this rank's round r - kMaxRoundsAhead. Before it sends round r, this rank has
// seen the flag of round r - kMaxRoundsAhead, so the peer has emptied the slot of
// round r - 2 kMaxRoundsAhead: twice kMaxRoundsAhead slots are enough. A two-shot kernel would need
// only kMaxRoundsAhead slots: a rank sends its slice of round r after it has emptied the slot of
// the sums of round r - kMaxRoundsAhead. The owner of the slice computed these sums from the slices
// of that round, so it has emptied their slot. The owner sends the sums of round r after it has
// received the slices of round r, whose senders had emptied the slots of its sums of
// round r - kMaxRoundsAhead.
//
// A flag needs a fence, which takes long while copies are in flight. Threads that copy therefore
// leave flags to a warp that does not copy. For .cu files.
#include <algorithm>
#include <cstring>

#include "torch_overlap/collectives/cuda/protocol_device.h"
#include "torch_overlap/common/cuda/hopper_device.h"

namespace torch_overlap::cuda::bulk {

using sm90::barrier_arrive;
using sm90::barrier_arrive_expect_tx;
using sm90::barrier_wait;
using sm90::bulk_commit_group;
using sm90::bulk_load;
using sm90::bulk_store;
using sm90::bulk_wait_group;
using sm90::bulk_wait_group_read;
using sm90::shared_address;

inline constexpr uint32_t kMaxRoundsAhead = G::kBulkAhead;
inline constexpr uint32_t kSlots = G::kBulkSlots;
// Maximum number of rounds of stores that are in flight when another one is issued. More stores
// would contend for the links, and fences would wait for them.
inline constexpr int kMaxStoresInFlight = 2;
inline constexpr int kNumReduceThreads = 128;
inline constexpr int kVectorBytes = G::kVectorBytes;
// Lower bound of the number of slots, for the reason above. It also bounds is_ready(): a flag may
// be up to 2 kMaxRoundsAhead - 1 rounds past the awaited one.
static_assert(kSlots >= 2 * kMaxRoundsAhead);

enum class BulkAlgo : uint8_t { copy, reduce, two_shot };
enum Kind : int { kParts, kSums };

// Number of stages of each role.
template <BulkAlgo kAlgo>
constexpr int kSendStages = kAlgo == BulkAlgo::two_shot ? 2 : 3;
template <BulkAlgo kAlgo>
constexpr int kForwardStages = kAlgo == BulkAlgo::copy ? 4 : 2;
template <BulkAlgo kAlgo>
constexpr int kReduceStages = kAlgo == BulkAlgo::two_shot ? 3 : 4;
inline constexpr int kMaxStages = 4;

constexpr bool has_forwarders(BulkAlgo shape) { return shape != BulkAlgo::reduce; }
constexpr bool has_reducers(BulkAlgo shape) { return shape != BulkAlgo::copy; }

struct BulkShared {
  BlockState state;
  uint64_t sent[G::kMaxRanks][kMaxStages];       // mbarrier: a sender's stage is full
  uint64_t forwarded[G::kMaxRanks][kMaxStages];  // mbarrier: a forwarder's stage is full
  uint64_t filled[kMaxStages];                   // mbarrier: filled by the loaders
  uint64_t emptied[kMaxStages];                  // mbarrier: emptied by the reducers
  uint32_t loaded[G::kMaxRanks];      // number of rounds that a sender has read from the tensor
  uint32_t taken[G::kMaxRanks];       // number of rounds whose slot (two-shot: of sums) is empty
  uint32_t arrived[2][G::kMaxRanks];  // number of rounds of each kind in the peer's memory
  uint32_t num_last_rounds;           // number of peers whose last round has arrived
  // Set after a failure. All threads continue, so that every copy is waited for, but nothing more
  // is sent, written or signalled.
  uint32_t failed;
};

// Called by all threads, which synchronize before they use `shared`.
__device__ __forceinline__ void init_shared(BulkShared& shared, int size) {
  if (threadIdx.x != 0) return;
  for (int rank = 0; rank < size; ++rank) {
    for (int stage = 0; stage < kMaxStages; ++stage) {
      sm90::barrier_init(shared_address(&shared.sent[rank][stage]), 1);
      sm90::barrier_init(shared_address(&shared.forwarded[rank][stage]), 1);
    }
    shared.loaded[rank] = 0;
    shared.taken[rank] = 0;
    shared.arrived[kParts][rank] = 0;
    shared.arrived[kSums][rank] = 0;
  }
  for (int stage = 0; stage < kMaxStages; ++stage) {
    sm90::barrier_init(shared_address(&shared.filled[stage]), size);
    sm90::barrier_init(shared_address(&shared.emptied[stage]), 1);
  }
  shared.num_last_rounds = 0;
  shared.failed = 0;
  sm90::fence_barrier_init();
}

// Calls body(p) in code for sm_90 and newer. In a build for older GPUs the kernel is empty.
template <typename Body>
__device__ __forceinline__ void run_on_sm90(const Body& body, const CollectiveParams& p) {
#if __CUDA_ARCH__ >= 900
  body(p);
#endif
}

struct Piece {
  const char* from;
  uint32_t bytes;  // 0 if nothing is left
};

struct Block {
  const CollectiveParams& p;
  BulkShared& shared;
  uint32_t stage_bytes;  // bytes of one chunk

  __device__ __forceinline__ uint64_t place(uint32_t round) const {
    return uint64_t{blockIdx.x + round * gridDim.x} * stage_bytes;
  }
  __device__ __forceinline__ uint32_t length(uint64_t at, uint64_t all) const {
    return at < all ? static_cast<uint32_t>(min(uint64_t{stage_bytes}, all - at)) : 0;
  }
  __device__ __forceinline__ uint32_t rounds() const {
    return p.max_chunks > blockIdx.x ? (p.max_chunks - blockIdx.x - 1) / gridDim.x + 1 : 0;
  }
  __device__ __forceinline__ uint32_t epoch(int peer, uint32_t round) const {
    return shared.state.epoch[peer] + 1 + round;
  }
  // Returns the slot of `owner` that `source` writes in the round with this epoch.
  __device__ __forceinline__ char* slot(int owner, int source, Kind kind, uint32_t epoch) const {
    const size_t kinds = G::bulk_kinds(p.size);
    const size_t index = (size_t{blockIdx.x} * kSlots + epoch % kSlots) * kinds + kind;
    const size_t part = index * (p.size - 1) + (source < owner ? source : source - 1);
    return p.base[owner] + p.bulk_offset + part * G::bulk_bytes(p.size);
  }
  // Returns the flag with the epoch of the last round that `source` has written to `owner`. It is
  // not the word that Simple polls: Simple treats an epoch that is four or more rounds ahead as
  // old.
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
    while (sm90::load_acquire_shared(word) < rounds && !has_failed()) __nanosleep(20);
  }
  // Called once per peer, when its last round has arrived or if it has none. After the call for the
  // last peer, every rank that this block still waits for is running, so the next kernel may
  // launch. Launched earlier, a kernel of this kind would occupy one SM per block while it waits.
  // It does so after the small kernels, which let it launch at once.
  __device__ __forceinline__ void on_last_round_arrived() const {
    if (atomicAdd_block(&shared.num_last_rounds, 1) + 2 == p.size) let_next_kernel_launch();
  }
};

// Flags of one source. One load may confirm more than one round.
class Arrivals {
 public:
  __device__ __forceinline__ Arrivals(const Block& block, int source, Kind kind)
      : block_(block), source_(source), kind_(kind) {}
  __device__ __forceinline__ bool has(uint32_t round) {
    if (round < rounds_) return true;
    const uint32_t expected = block_.epoch(source_, round);
    const uint32_t seen = load_acquire(flag());
    if (!is_ready(seen, expected, kSlots)) return false;
    rounds_ = round + 1 + (seen - expected);
    return true;
  }
  // Returns when the round has arrived, or after a failure.
  __device__ __forceinline__ void await(uint32_t round) {
    for (int spins = 1; !block_.has_failed() && !has(round); ++spins) {
      if (spins % kSpinsBeforeCheck != 0) continue;
      const uint32_t expected = block_.epoch(source_, round);
      if (!wait_slow_path(block_.p, flag(), source_, expected, kSlots)) block_.fail();
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

// --- Roles of one thread each --------------------------------------------------------------------

// Waits for the last kLeft + 1 rounds one by one, and calls note() with the number of completed
// rounds after each.
template <int kLeft, typename Note>
__device__ __forceinline__ void note_remaining(uint32_t rounds, const Note& note) {
  bulk_wait_group<kLeft>();
  if (rounds > kLeft) note(rounds - kLeft);
  if constexpr (kLeft > 0) note_remaining<kLeft - 1>(rounds, note);
}

// Sends all rounds to `peer`. piece(round) returns the data of a round.
template <int kStages, typename GetPiece>
__device__ __forceinline__ void send(const Block& block, int peer, uint32_t stages,
                                     const GetPiece& piece) {
  const CollectiveParams& p = block.p;
  BulkShared& shared = block.shared;
  const uint32_t rounds = rounds_with(p, peer);
  const uint32_t barriers = shared_address(shared.sent[peer]);
  bool is_good = true;  // true while every round so far has been sent
  const auto note_arrived = [&](uint32_t rounds_before) {
    if (is_good) sm90::store_release_shared(shared.arrived[kParts][peer], rounds_before);
  };
  const auto load = [&](uint32_t round) {
    if (round >= rounds) return;
    const Piece next = piece(round);
    const uint32_t stage = round % kStages;
    barrier_arrive_expect_tx(barriers + stage * 8, next.bytes);
    if (next.bytes > 0) {
      bulk_load(stages + stage * block.stage_bytes, next.from, next.bytes, barriers + stage * 8);
    }
  };
#pragma unroll
  for (int round = 0; round < kStages - 1; ++round) load(round);
  for (uint32_t round = 0; round < rounds; ++round) {
    if (round >= kMaxRoundsAhead) {
      if (sm90::load_acquire_shared(shared.taken[peer]) < round + 1 - kMaxRoundsAhead) {
        // The peer may be waiting for rounds that it has not been notified of.
        bulk_wait_group<0>();
        note_arrived(round);
        block.await(shared.taken[peer], round + 1 - kMaxRoundsAhead);
      }
      sm90::fence_proxy_async_global();
    }
    const uint32_t stage = round % kStages;
    barrier_wait(barriers + stage * 8, round / kStages % 2);
    sm90::store_release_shared(shared.loaded[peer], round + 1);
    const uint32_t bytes = piece(round).bytes;
    is_good = is_good && !block.has_failed();
    if (bytes > 0 && is_good) {
      bulk_store(block.slot(peer, p.rank, kParts, block.epoch(peer, round)),
                 stages + stage * block.stage_bytes, bytes);
    }
    bulk_commit_group();
    if (round >= kMaxStoresInFlight) {
      bulk_wait_group<kMaxStoresInFlight>();
      note_arrived(round + 1 - kMaxStoresInFlight);
    }
    bulk_wait_group_read<1>();
    load(round + kStages - 1);
  }
  note_remaining<kMaxStoresInFlight - 1>(rounds, note_arrived);
}

// Copies the rounds of `source` to place(round). The data of this rank itself is at own(round).
template <int kStages, typename GetPlace, typename GetOwn>
__device__ __forceinline__ void forward(const Block& block, int source, Kind kind, uint32_t rounds,
                                        uint32_t stages, const GetPlace& place, const GetOwn& own) {
  constexpr int kLag = std::max(kStages - 2, 1);  // number of rounds whose loads are in flight
  const CollectiveParams& p = block.p;
  BulkShared& shared = block.shared;
  const uint32_t barriers = shared_address(shared.forwarded[source]);
  Arrivals arrivals(block, source, kind);
  uint32_t ended = 0;
  const auto end_before = [&](uint32_t round) {
    for (; ended < round; ++ended) {
      const uint32_t stage = ended % kStages;
      barrier_wait(barriers + stage * 8, ended / kStages % 2);
      sm90::store_release_shared(shared.taken[source], ended + 1);
      const Piece to = place(ended);
      if (to.bytes > 0 && !block.has_failed()) {
        bulk_store(const_cast<char*>(to.from), stages + stage * block.stage_bytes, to.bytes);
      }
      bulk_commit_group();
    }
  };
  for (uint32_t round = 0; round < rounds; ++round) {
    if (source != p.rank) {
      if (!arrivals.has(round)) end_before(round);
      arrivals.await(round);
    }
    // All but the last kLag rounds have ended. Their stores up to round - kStages must have read
    // their stages, and at least kStages - kLag - 1 stores were committed after those.
    if (round >= kStages) bulk_wait_group_read<kStages - kLag - 1>();
    const uint32_t stage = round % kStages;
    const uint32_t bytes = place(round).bytes;
    if (bytes == 0 || block.has_failed()) {
      barrier_arrive(barriers + stage * 8);
    } else {
      sm90::fence_proxy_async_global();
      barrier_arrive_expect_tx(barriers + stage * 8, bytes);
      const char* const from = source == p.rank
                                   ? own(round)
                                   : block.slot(p.rank, source, kind, block.epoch(source, round));
      bulk_load(stages + stage * block.stage_bytes, from, bytes, barriers + stage * 8);
    }
    if (round >= kLag) end_before(round + 1 - kLag);
  }
  if (source != p.rank) block.on_last_round_arrived();
  end_before(rounds);
  bulk_wait_group<0>();
}

// Loads the source's part of each stage. own(round) returns this rank's part.
template <int kStages, bool kIsLast, typename GetOwn>
__device__ __forceinline__ void take(const Block& block, int source, uint32_t stages,
                                     const GetOwn& own) {
  const CollectiveParams& p = block.p;
  BulkShared& shared = block.shared;
  const uint32_t rounds = block.rounds();
  const uint32_t filled = shared_address(shared.filled);
  const uint32_t emptied = shared_address(shared.emptied);
  const uint32_t part = stages + source * block.stage_bytes;
  Arrivals arrivals(block, source, kParts);
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint32_t stage = round % kStages;
    if (round >= kStages) barrier_wait(emptied + stage * 8, (round / kStages - 1) % 2);
    const Piece mine = own(round);  // of the same length on all ranks
    const char* from = mine.from;
    if (source != p.rank) {
      arrivals.await(round);
      from = block.slot(p.rank, source, kParts, block.epoch(source, round));
      sm90::fence_proxy_async_global();
    }
    if (mine.bytes == 0 || block.has_failed()) {
      barrier_arrive(filled + stage * 8);
    } else {
      barrier_arrive_expect_tx(filled + stage * 8, mine.bytes);
      bulk_load(part + stage * p.size * block.stage_bytes, from, mine.bytes, filled + stage * 8);
    }
  }
  if (kIsLast && source != p.rank) block.on_last_round_arrived();
}

// --- Reducers ------------------------------------------------------------------------------------

__device__ __forceinline__ Words<4> load_shared(uint32_t address) {
  Words<4> out;
  const uint4 all = sm90::load_vector(address);
  std::memcpy(out.at, &all, sizeof(all));
  return out;
}

// Reduces in rank order, over the part of rank 0.
template <typename T, typename Case>
__device__ __forceinline__ void reduce_stage(const CollectiveParams& p, uint32_t parts,
                                             uint32_t stage_bytes, uint32_t bytes, int thread) {
  for (uint32_t at = thread * kVectorBytes; at < bytes; at += kNumReduceThreads * kVectorBytes) {
    Words<4> seen[Case::kMaxRanks];
#pragma unroll
    for (int source = 0; source < Case::kMaxRanks; ++source) {
      if (source >= size_of<Case>(p)) continue;
      seen[source] = load_shared(parts + source * stage_bytes + at);
    }
    const auto sum = accumulate<T, Case>(p, seen).result(p.op, size_of<Case>(p));
    sm90::store_vector(parts + at, uint4{sum.at[0], sum.at[1], sum.at[2], sum.at[3]});
  }
}

// Reduces all rounds. out(round) returns the destination of the sum. kSends: the sum also goes to
// all peers.
template <typename T, typename Case, BulkAlgo kAlgo, typename GetPlace>
__device__ __forceinline__ void add(const Block& block, int thread, uint32_t stages,
                                    const GetPlace& out) {
  constexpr int kStages = kReduceStages<kAlgo>;
  constexpr bool kSends = kAlgo == BulkAlgo::two_shot;
  const CollectiveParams& p = block.p;
  BulkShared& shared = block.shared;
  const uint32_t rounds = block.rounds();
  const uint32_t filled = shared_address(shared.filled);
  const uint32_t emptied = shared_address(shared.emptied);
  bool is_good = true;  // thread 0: true while all rounds so far have been reduced and sent
  const auto note_arrived = [&](uint32_t rounds_before) {
    if (!is_good) return;
    for (int peer = 0; peer < p.size; ++peer) {
      sm90::store_release_shared(shared.arrived[kSums][peer], rounds_before);
    }
  };
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint32_t stage = round % kStages;
    const uint32_t parts = stages + stage * p.size * block.stage_bytes;
    barrier_wait(filled + stage * 8, round / kStages % 2);
    if (!kSends && thread < p.size) sm90::store_release_shared(shared.taken[thread], round + 1);
    const Piece to = out(round);
    if (to.bytes > 0 && !block.has_failed()) {
      reduce_stage<T, Case>(p, parts, block.stage_bytes, to.bytes, thread);
    }
    sm90::fence_proxy_async_shared();
    sm90::named_barrier_sync(1, kNumReduceThreads);
    if (thread >= kWarp) continue;
    if (thread == 0) {
      is_good = is_good && !block.has_failed();  // then no thread has seen a failure
      if (to.bytes > 0 && is_good) {
        bulk_store(const_cast<char*>(to.from), parts, to.bytes);
        if constexpr (kSends) {
          for (int k = 1; k < p.size; ++k) {
            const int peer = rank_after<Case>(p, k);
            bulk_store(block.slot(peer, p.rank, kSums, block.epoch(peer, round)), parts, to.bytes);
          }
        }
      }
      bulk_commit_group();
      if constexpr (kSends) {
        bulk_wait_group<1>();
        note_arrived(round);
      } else {
        bulk_wait_group_read<1>();
      }
      if (round > 0) barrier_arrive(emptied + (round - 1) % kStages * 8);
    }
  }
  if (thread != 0) return;
  bulk_wait_group<0>();
  if constexpr (kSends) note_arrived(rounds);
}

// --- Notifier ------------------------------------------------------------------------------------

// Executed by one warp. Each lane notifies one peer of one kind of data.
template <int kKinds>
__device__ __forceinline__ void signal_peers(const Block& block, int lane) {
  constexpr unsigned int kAll = ~0U;
  static_assert(kKinds * G::kMaxRanks <= kWarp);
  const CollectiveParams& p = block.p;
  const auto kind = static_cast<Kind>(lane / G::kMaxRanks);
  const int peer = lane % G::kMaxRanks;
  const bool is_needed = kind < kKinds && peer < p.size && peer != p.rank;
  const uint32_t rounds = is_needed ? rounds_with(p, peer) : 0;
  uint32_t notified = 0;
  while (__any_sync(kAll, notified < rounds) && !__any_sync(kAll, block.has_failed())) {
    const uint32_t arrived =
        notified < rounds ? sm90::load_acquire_shared(block.shared.arrived[kind][peer]) : notified;
    if (arrived > notified) {
      store_release(block.flag(peer, p.rank, kind), block.epoch(peer, arrived - 1));
      notified = arrived;
    } else {
      __nanosleep(20);
    }
    __syncwarp();
  }
}

}  // namespace torch_overlap::cuda::bulk
