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
// A flag stands behind a fence, and a fence of a thread waits for all copies that the thread has on
// their way, also those of later rounds. So those who copy leave flags to a warp that copies
// nothing.
#include <algorithm>

#include "torch_overlap/comm/backends/nccl/direct_device.h"
#include "torch_overlap/common/cuda/hopper_device.h"

namespace torch_overlap::cuda {
namespace {

using sm90::barrier_arrive;
using sm90::barrier_expect;
using sm90::barrier_wait;
using sm90::bulk_load;
using sm90::bulk_store;
using sm90::shared_address;
using sm90::store_commit;
using sm90::stores_done;
using sm90::stores_read;

constexpr uint32_t kAhead = G::kBulkAhead;
constexpr uint32_t kSlots = G::kBulkSlots;
constexpr uint32_t kFlying = 2;  // rounds of stores that are not told of, while others follow
constexpr int kAdders = 128;     // threads
constexpr int kVectorBytes = G::kVectorBytes;
static_assert(kSlots >= 2 * kAhead && kFlying < kAhead);

enum class Shape : uint8_t { copy, reduce, two_shot };
enum Kind : int { kParts, kSums };

// How many stages each role has.
template <Shape kShape>
constexpr int kSendStages = kShape == Shape::two_shot ? 2 : 3;
template <Shape kShape>
constexpr int kForwardStages = kShape == Shape::copy ? 4 : 2;
template <Shape kShape>
constexpr int kAddStages = kShape == Shape::two_shot ? 3 : 4;
constexpr int kMostStages = 4;

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
  uint32_t failed;                     // all go on, but nothing is sent or written any more
};

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
  // The epoch of the last round that `source` has written to `owner`. Of a line whose first word
  // is the flag of pushes: they have fewer rounds under way.
  __device__ __forceinline__ uint32_t* flag(int owner, int source, Kind kind) const {
    return flag_of(p, 0, owner, source) + 1 + kind;
  }
  __device__ __forceinline__ bool has_failed() const {
    return *static_cast<const volatile uint32_t*>(&shared.failed) != 0;
  }
  __device__ __forceinline__ void fail() const {
    *static_cast<volatile uint32_t*>(&shared.failed) = 1;
  }
  // Words of one writer each.
  __device__ __forceinline__ void note(uint32_t& word, uint32_t rounds) const {
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&word)), "r"(rounds)
                 : "memory");
  }
  __device__ __forceinline__ uint32_t noted(const uint32_t& word) const {
    uint32_t rounds;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
                 : "=r"(rounds)
                 : "r"(shared_address(&word))
                 : "memory");
    return rounds;
  }
  __device__ __forceinline__ void await(const uint32_t& word, uint32_t rounds) const {
    while (noted(word) < rounds && !has_failed()) __nanosleep(20);
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

// piece(round): what goes to the peer.
template <int kStages, typename GetPiece>
__device__ __forceinline__ void send(const Block& block, int peer, uint32_t stages,
                                     const GetPiece& piece) {
  const DirectParams& p = block.p;
  BulkShared& shared = block.shared;
  const uint32_t rounds = rounds_with(p, peer);
  const uint32_t barriers = shared_address(shared.sent[peer]);
  uint32_t& arrived = shared.arrived[kParts][peer];
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
    if (round >= kAhead && block.noted(shared.taken[peer]) < round + 1 - kAhead) {
      // The peer may be waiting for what it has not been told of.
      stores_done<0>();
      block.note(arrived, round);
      block.await(shared.taken[peer], round + 1 - kAhead);
    }
    const uint32_t stage = round % kStages;
    barrier_wait(barriers + stage * 8, round / kStages % 2);
    block.note(shared.loaded[peer], round + 1);
    const uint32_t bytes = piece(round).bytes;
    if (bytes > 0 && !block.has_failed()) {
      bulk_store(block.slot(peer, p.rank, kParts, block.epoch(peer, round)),
                 stages + stage * block.stage_bytes, bytes);
    }
    store_commit();
    if (round >= kFlying) {
      stores_done<kFlying>();
      block.note(arrived, round + 1 - kFlying);
    }
    stores_read<1>();
    load(round + kStages - 1);
  }
  stores_done<1>();
  if (rounds > 1) block.note(arrived, rounds - 1);
  stores_done<0>();
  block.note(arrived, rounds);
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
      block.note(shared.taken[source], ended + 1);
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
    // All but the last kLag rounds have ended.
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
  end_before(rounds);
  stores_done<0>();
}

// Fills the source's part of each stage. own(round): this rank's.
template <int kStages, typename GetOwn>
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
  const auto note_arrived = [&](uint32_t rounds_before) {
    for (int peer = 0; peer < p.size; ++peer) {
      block.note(shared.arrived[kSums][peer], rounds_before);
    }
  };
  for (uint32_t round = 0; round < rounds; ++round) {
    const uint32_t stage = round % kStages;
    const uint32_t parts = stages + stage * p.size * block.stage_bytes;
    barrier_wait(filled + stage * 8, round / kStages % 2);
    if (!kSends && thread < p.size) block.note(shared.taken[thread], round + 1);
    const Piece to = out(round);
    const bool is_good = to.bytes > 0 && !block.has_failed();
    if (is_good) add_up<T, Case>(p, parts, block.stage_bytes, to.bytes, thread);
    sm90::fence_shared_for_copies();
    sm90::meet_threads(1, kAdders);
    if (thread >= kWarp) continue;
    if (thread == 0) {
      if (is_good) {
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
    const uint32_t arrived = told < rounds ? block.noted(block.shared.arrived[kind][peer]) : told;
    if (arrived > told) {
      store_release(block.flag(peer, p.rank, kind), block.epoch(peer, arrived - 1));
      told = arrived;
    } else {
      __nanosleep(20);
    }
    __syncwarp();
  }
}

// --- Kernels -------------------------------------------------------------------------------------

__host__ __device__ constexpr int threads_of(Shape shape, int size) {
  const int forwarders = shape == Shape::copy ? size : shape == Shape::two_shot ? size - 1 : 0;
  const int takers = has_adders(shape) ? size : 0;
  return (1 + size - 1 + forwarders + takers) * kWarp + (has_adders(shape) ? kAdders : 0);
}

template <Shape kShape>
__host__ __device__ constexpr uint32_t stages_of(int size) {
  int count = (size - 1) * kSendStages<kShape>;
  if (kShape == Shape::copy) count += size * kForwardStages<kShape>;
  if (kShape == Shape::two_shot) count += (size - 1) * kForwardStages<kShape>;
  if (has_adders(kShape)) count += size * kAddStages<kShape>;
  return static_cast<uint32_t>(count);
}

__device__ __forceinline__ void init(BulkShared& shared, int size) {
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
  shared.failed = 0;
  sm90::fence_barrier_init();
}

// A block's roles, by warp: teller, senders, forwarders, takers, adders.
template <Shape kShape, typename T, typename Case>
__device__ __forceinline__ void run_roles(const Block& block, uint32_t stages) {
  const DirectParams& p = block.p;
  BulkShared& shared = block.shared;
  const uint32_t bytes = block.stage_bytes;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool is_first = lane == 0;
  int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (warp == 0) return tell<kShape == Shape::two_shot ? 2 : 1>(block, lane);
  --warp;

  const auto slice = [&](int rank) {
    return kShape == Shape::two_shot ? slice_of(p, rank) : Slice{0, p.send_bytes[rank]};
  };
  // What goes to a rank, or is this rank's own.
  const auto piece_for = [&](int rank, uint32_t round) {
    const Slice part = slice(rank);
    const uint64_t at = block.place(round);
    return Piece{p.send[rank] + part.begin + at, block.length(at, part.bytes)};
  };
  constexpr int kSend = kSendStages<kShape>;
  const int peers = p.size - 1;
  if (warp < peers) {
    const int peer = rank_after<Case>(p, warp + 1);
    if (!is_first) return;
    return send<kSend>(block, peer, stages + warp * kSend * bytes,
                       [&](uint32_t round) { return piece_for(peer, round); });
  }
  warp -= peers;
  stages += peers * kSend * bytes;

  if constexpr (has_forwarders(kShape)) {
    constexpr int kForward = kForwardStages<kShape>;
    constexpr bool kOwnToo = kShape == Shape::copy;
    const int forwarders = kOwnToo ? p.size : peers;
    if (warp < forwarders) {
      const int source = rank_before<Case>(p, kOwnToo ? warp : warp + 1);
      if (!is_first) return;
      const bool is_own = source == p.rank;
      if (is_own && p.recv[source] == p.send[source]) return;
      const uint32_t own_rounds = p.recv_bytes[source] > block.place(0) ? block.rounds() : 0;
      const auto place = [&](uint32_t round) {
        const uint64_t at = block.place(round);
        if constexpr (kShape == Shape::copy) {
          return Piece{p.recv[source] + at, block.length(at, p.recv_bytes[source])};
        }
        const Slice part = slice(source);
        return Piece{p.recv[0] + part.begin + at, block.length(at, part.bytes)};
      };
      return forward<kForward>(block, source, kOwnToo ? kParts : kSums,
                               is_own ? own_rounds : rounds_with(p, source),
                               stages + warp * kForward * bytes, place,
                               [&](uint32_t round) { return p.send[source] + block.place(round); });
    }
    warp -= forwarders;
    stages += forwarders * kForward * bytes;
  }

  if constexpr (has_adders(kShape)) {
    if (warp < p.size) {
      if (!is_first) return;
      return take<kAddStages<kShape>>(block, warp, stages, [&](uint32_t round) {
        // In place the sum is written where a sender reads: it has to have done so.
        if (kShape == Shape::reduce && p.one_source && warp == p.rank) {
          for (int k = 1; k < p.size; ++k) {
            block.await(shared.loaded[rank_after<Case>(p, k)], round + 1);
          }
        }
        return piece_for(p.rank, round);
      });
    }
    warp -= p.size;
    const int thread = warp * kWarp + lane;
    add<T, Case, kShape>(block, thread, stages, [&](uint32_t round) {
      Piece out = piece_for(p.rank, round);
      out.from = p.recv[0] + slice(p.rank).begin + block.place(round);
      return out;
    });
  }
}

template <Shape kShape, typename T, typename Case>
__global__ void __launch_bounds__(threads_of(kShape, Case::kMostRanks), 1)
    bulk_kernel(const __grid_constant__ DirectParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char stages[];
  __shared__ BulkShared shared;
  init(shared, p.size);
  // The next kernel is not let in early: its blocks would hold SMs, one each, while they wait, and
  // those of two communicators could hold all of them.
  wait_for_kernel_before();
  if (enter_block(p, shared.state)) {
    const Block block{p, shared, p.chunk * kVectorBytes};
    run_roles<kShape, T, Case>(block, shared_address(stages));
  }
  end_block(p, shared.state);
#endif
}

template <Shape kShape, typename T, typename Case>
cudaError_t launch(const DirectParams& params, DirectLaunch launch) {
  const auto kernel = bulk_kernel<kShape, T, Case>;
  launch.threads = threads_of(kShape, params.size);
  launch.shared_bytes = stages_of<kShape>(params.size) * params.chunk * kVectorBytes;
  return launch_direct(kernel, launch, params);
}

template <Shape kShape, typename T, typename Case>
cudaError_t load() {
  const auto kernel = bulk_kernel<kShape, T, Case>;
  const cudaError_t status = load_kernel(kernel);
  if (status != cudaSuccess) return status;
  constexpr int kSize = Case::kMostRanks;
  size_t most = 0;
  for (int size = 2; size <= kSize; ++size) {
    most = std::max(most, size_t{stages_of<kShape>(size)} * G::bulk_bytes(size));
  }
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(most));
}

}  // namespace

cudaError_t launch_bulk_copy(const DirectParams& params, const DirectLaunch& how) {
  return launch<Shape::copy, float, AnyCase>(params, how);
}

cudaError_t launch_bulk_reduce(DirectType type, const DirectParams& params,
                               const DirectLaunch& how) {
  return for_reduction(type, params, kVectorBytes, [&](auto zero, auto which) {
    return launch<Shape::reduce, decltype(zero), decltype(which)>(params, how);
  });
}

cudaError_t launch_bulk_two_shot(DirectType type, const DirectParams& params,
                                 const DirectLaunch& how) {
  return for_reduction(type, params, kVectorBytes, [&](auto zero, auto which) {
    using Case = decltype(which);
    if constexpr (Case::kMostRanks > 2) {
      return launch<Shape::two_shot, decltype(zero), Case>(params, how);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

cudaError_t load_bulk_kernels() {
  const cudaError_t status = load<Shape::copy, float, AnyCase>();
  if (status != cudaSuccess) return status;
  return load_reductions([](auto zero, auto which) {
    using T = decltype(zero);
    using Case = decltype(which);
    const cudaError_t loaded = load<Shape::reduce, T, Case>();
    if constexpr (Case::kMostRanks > 2) {
      if (loaded == cudaSuccess) return load<Shape::two_shot, T, Case>();
    }
    return loaded;
  });
}

}  // namespace torch_overlap::cuda
