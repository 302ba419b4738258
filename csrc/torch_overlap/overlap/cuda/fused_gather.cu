#include "torch_overlap/gemm/sm90/body.cuh"
#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/overlap/cuda/product_operation.cuh"

// All-gather + GEMM in one kernel: the product of all rows, which waits for those of the other
// ranks. Copy engines bring them chunk by chunk; or the first blocks of the kernel send this rank's
// rows, a slice of k after the other to all ranks, and take part in the product afterwards:
//
//   one thread     rows -> stage -> memory of each peer ...    tensor copies
//   four warps     a fence behind copies that have ended, then words of the peers
//
// Where a product is few waves of tiles, rows that come slice by slice are multiplied as they come:
// nobody waits for all of k of a chunk.
//
// With senders it is an operation by itself. Block 0 tells the others that this rank has begun;
// senders wait for all of them to have before they send. The last block to end sets the epoch.
namespace torch_overlap::cuda {
namespace {

using sm90::note;
using sm90::noted;
using sm90::shared_address;

// Tiles of one chunk after the other, in the order in which they arrive: one schedule for all, so
// that no wave of blocks ends with a chunk. The last ones are those of the blocks that have sent.
template <typename Config>
class GatherUnits {
 public:
  __device__ __forceinline__ explicit GatherUnits(const FusedGatherParams& p)
      : p_(p), at_(sends(p) ? p.units_of_others + cluster() : cluster() - senders(p)) {}

  __device__ __forceinline__ bool next(sm90::Unit& unit) {
    if (!sends(p_) && at_ >= p_.units_of_others) return false;
    const int columns = sm90::ceil_div(p_.gemm.n, Config::kColumns);
    int place = at_;
    at_ += sends(p_) ? senders(p_) : static_cast<int>(gridDim.x) / Config::kCluster - senders(p_);
#pragma unroll 1
    for (int step = 0; step < p_.operation.words.size; ++step) {
      const int chunk = p_.order[step];
      const int rows = sm90::ceil_div(p_.rows[chunk], Config::kRows * Config::kCluster);
      if (place < rows * columns) {
        unit = sm90::tile_at(place, rows, columns, p_.gemm.row_group,
                             sm90::ceil_div(p_.gemm.k, Config::kDepth));
        if constexpr (Config::kCluster > 1) {
          unit.row = unit.row * Config::kCluster + static_cast<int>(sm90::cluster_rank());
        }
        unit.chunk = chunk;
        return true;
      }
      place -= rows * columns;
    }
    return false;
  }

 private:
  // In clusters.
  static __device__ __forceinline__ int cluster() {
    return static_cast<int>(blockIdx.x) / Config::kCluster;
  }
  static __device__ __forceinline__ int senders(const FusedGatherParams& p) {
    return p.senders / Config::kCluster;
  }
  static __device__ __forceinline__ bool sends(const FusedGatherParams& p) {
    return static_cast<int>(blockIdx.x) < p.senders;
  }

  const FusedGatherParams& p_;
  int at_;
};

// The thread that loads has no time to ask for words of other ranks: each takes a trip to memory,
// and a fence. Another warp does, for 32 words at once, and notes what is there.
template <typename Config>
struct GatherWork {
  static constexpr sm90::Adds kAdds = sm90::Adds::nothing;
  static constexpr bool kAwaits = true;
  const FusedGatherParams& p;
  uint32_t& ready;      // stages of all units of this block, one after the other, that are there
  uint32_t before = 0;  // of the units before this one

  __device__ __forceinline__ GatherUnits<Config> units(const sm90::GemmParams&) {
    return GatherUnits<Config>(p);
  }
  __device__ __forceinline__ const CUtensorMap* lhs(const sm90::Unit& unit, int& row) const {
    if (unit.chunk == p.operation.words.rank) return &p.gemm.lhs;
    row += p.begin[unit.chunk];
    return &p.gathered;
  }
  __device__ __forceinline__ int await(const sm90::Unit& unit, int k) const {
    uint32_t there;
    do {
      there = noted(ready) - before;
    } while (there <= static_cast<uint32_t>(k));
    return min(static_cast<int>(there), unit.depth);
  }
  __device__ __forceinline__ void has_loaded(const sm90::Unit& unit) { before += unit.depth; }
  __device__ __forceinline__ const float* lhs_scale(const sm90::Unit& unit, int& rows) const {
    rows = p.rows[unit.chunk];
    return p.lhs_scale[unit.chunk];
  }
  __device__ __forceinline__ void store(const sm90::Unit& unit, uint32_t from, int column,
                                        int row) {
    sm90::tensor_store(&p.out[unit.chunk], from, column, row);
  }

  // Of a warp. When a wait has failed all counts as there: nobody waits any more.
  __device__ __forceinline__ void watch() const {
    const ProductOperation operation(p.operation, p.begun);
    const bool begins = p.senders > 0;
    const uint32_t epoch = begins ? operation.epoch() : operation.epoch() - 1;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t complete = 1U << p.operation.words.rank;  // chunks that are there
    uint32_t all = 0;                                  // stages of the units before
    GatherUnits<Config> units(p);
    sm90::Unit unit;
    while (units.next(unit)) {
      const int slices = sm90::ceil_div(unit.depth, p.slice_stages);
      const bool is_there = (complete >> unit.chunk & 1) != 0;
      int looks = 0;
      for (int slice = is_there ? slices : 0; slice < slices;) {
        const int come = count_slices(unit.chunk, slice, slices, epoch, lane);
        if (come == 0) {
          if (++looks % kLooksWithoutNaps == 0 && lane == 0) {
            await_slice(operation, unit.chunk, slice, epoch, begins);
          }
          __syncwarp();
          continue;
        }
        slice += come;
        if (lane == 0) note(ready, all + min(slice * p.slice_stages, unit.depth));
      }
      complete |= 1U << unit.chunk;
      all += unit.depth;
      if (lane == 0) note(ready, all);
    }
  }
  __device__ __forceinline__ void end() const {
    if (p.senders > 0) ProductOperation(p.operation, p.begun).end();
  }

 private:
  // Words of a slice.
  __device__ __forceinline__ int writers() const { return max(p.senders, 1); }
  // How many slices from this one on are there: of some, the words of all writers at once.
  __device__ __forceinline__ int count_slices(int chunk, int slice, int slices, uint32_t epoch,
                                              int lane) const {
    const int most = min(32 / writers(), slices - slice);
    const bool is_due = lane < most * writers();
    const uint32_t* const words = p.told[chunk] + slice * writers();
    const bool is_missing =
        is_due && !reached(load_acquire(words + lane), epoch) && !has_failed(p.operation.control);
    const int first = __ffs(static_cast<int>(__ballot_sync(~0U, is_missing))) - 1;
    sm90::fence_global_for_copies();
    __syncwarp();
    return first < 0 ? most : first / writers();
  }
  // First that the rank has begun, if it is to tell: so that this is what expires.
  __device__ __forceinline__ void await_slice(const ProductOperation& operation, int chunk,
                                              int slice, uint32_t epoch, bool begins) const {
    if (begins) operation.await_begun(chunk);
#pragma unroll 1
    for (int i = 0; i < writers(); ++i) {
      await_late_word(p.operation.words, p.told[chunk] + slice * writers() + i, epoch,
                      WaitKind::chunk, chunk, p.operation.control, kManyLookAtHostNs);
    }
  }
};

// A block that sends its part of this rank's rows to all peers: every so many-th of their boxes,
// which go down the rows and then along k.
template <typename Config>
class GatherSender {
  static constexpr int kBoxBytes = kSentRows * kSentBytes;
  static constexpr int kStages = 24;
  // Boxes that are read when another is sent, and that are on their way to the peers.
  static constexpr int kReading = 2;
  static constexpr int kFlying = 4;
  static constexpr int kTellers = 4;  // warps
  static_assert(kStages * kBoxBytes + 1024 <= Config::kSharedBytes && kReading < kStages);
  static_assert(kStages <= 32, "a warp loads the first boxes");
  static_assert(32 * (1 + kTellers) <= Config::kThreads);

 public:
  struct Shared {
    uint64_t loaded[kStages];
    uint32_t sent;  // slices whose copies have ended
    uint32_t failed;
  };

  __device__ __forceinline__ GatherSender(const FusedGatherParams& p, Shared& shared,
                                          uint32_t stages)
      : p_(p),
        operation_(p.operation, p.begun),
        shared_(shared),
        stages_(stages),
        row_boxes_(sm90::ceil_div(p.rows[p.operation.words.rank], kSentRows)),
        slice_boxes_(p.slice_stages / kStagesOfBox),
        boxes_(sm90::ceil_div(
            row_boxes_ * sm90::ceil_div(p.gemm.k, kColumns) - static_cast<int>(blockIdx.x),
            p.senders)) {}

  // Of all threads; the block's shared memory is free afterwards.
  __device__ __forceinline__ void run() {
    const auto warp = static_cast<int>(threadIdx.x) / 32;
    const auto lane = static_cast<int>(threadIdx.x) % 32;
    const bool copies = threadIdx.x == 0;
    if (copies) {
      for (int i = 0; i < kStages; ++i) sm90::barrier_init(shared_address(&shared_.loaded[i]), 1);
      shared_.sent = 0;
      shared_.failed = 0;
      sm90::fence_barrier_init();
    }
    __syncthreads();
    if (warp == 0 && lane < kStages) load(lane);  // while the ranks meet
    if (blockIdx.x == 0 && warp == 1) operation_.tell_begun(lane);
    if (blockIdx.x == 0 && warp == 3 && lane == 0) operation_.check_alone();
    const bool has_rows = row_boxes_ > 0;  // else nothing keeps the entries of the others
    if (has_rows && warp == 2 && is_peer(p_.operation.words, lane) && !operation_.may_send(lane)) {
      shared_.failed = 1;
    }
    __syncthreads();
    const bool is_good = shared_.failed == 0;
    if (is_good && p_.scales_to[p_.operation.words.rank] != nullptr) send_scales();
    __syncthreads();
    if (copies) send(is_good);
    if (warp >= 1 && warp <= kTellers && is_good) tell(warp - 1, lane);
    __syncthreads();
  }

 private:
  static constexpr int kStagesOfBox = kSentBytes / 128;
  static constexpr int kColumns = kStagesOfBox * Config::kDepth;  // of a box

  // The i-th box of this block.
  struct Box {
    int row;
    int column;
    int slice;

    __device__ __forceinline__ Box(const GatherSender& from, int i) {
      const int number = static_cast<int>(blockIdx.x) + i * from.p_.senders;
      const int along_k = number / from.row_boxes_;
      row = number - along_k * from.row_boxes_;
      column = along_k * kColumns;
      slice = along_k / from.slice_boxes_;
    }
  };

  // By how many ranks a peer comes behind this one: 1 and more.
  __device__ __forceinline__ int rank_behind(int ranks) const {
    const int rank = p_.operation.words.rank + ranks;
    return rank < p_.operation.words.size ? rank : rank - p_.operation.words.size;
  }

  // The i-th box, into shared memory.
  __device__ __forceinline__ void load(int i) const {
    if (i >= boxes_) return;
    const Box box(*this, i);
    const uint32_t barrier = shared_address(&shared_.loaded[i % kStages]);
    sm90::barrier_expect(barrier, kBoxBytes);
    sm90::tensor_load(stages_ + i % kStages * kBoxBytes, &p_.own, barrier,
                      box.column * kElement / kSentElement, box.row * kSentRows);
  }

  __device__ __forceinline__ void send(bool is_good) const {
    if (boxes_ > 0) note(shared_.sent, Box(*this, 0).slice);  // of those before it has none
    sm90::fence_global_for_copies();  // what the peers have read comes before what is stored
    const int size = p_.operation.words.size;
    for (int i = 0; i < boxes_; ++i) {
      sm90::barrier_wait(shared_address(&shared_.loaded[i % kStages]), i / kStages & 1);
      const Box box(*this, i);
      for (int peer = 1; peer < size && is_good; ++peer) {
        sm90::tensor_store(&p_.to[rank_behind(peer)], stages_ + i % kStages * kBoxBytes,
                           box.column * kElement / kSentElement, box.row * kSentRows);
      }
      sm90::store_commit();
      if (i >= kReading) {
        sm90::stores_read<kReading>();
        load(i - kReading + kStages);
      }
      if (i >= kFlying) {
        sm90::stores_done<kFlying>();
        note(shared_.sent, Box(*this, i - kFlying + 1).slice);  // all before it have come
      }
    }
    sm90::stores_done<0>();
    note(shared_.sent, slices());
  }
  __device__ __forceinline__ int slices() const {
    return sm90::ceil_div(sm90::ceil_div(p_.gemm.k, Config::kDepth), p_.slice_stages);
  }

  // Tells the peers of slices that are there: teller 0 of slices 0, kTellers, ... A fence takes
  // long while copies of the thread are on their way, so it is another one that tells; as long for
  // many slices as for one; and the next teller does not wait for its end.
  __device__ __forceinline__ void tell(int teller, int lane) const {
    const OperationParams& operation = p_.operation;
    const int all = slices();
    for (int next = teller; next < all;) {
      const auto sent = static_cast<int>(__shfl_sync(~0U, noted(shared_.sent), 0));
      const int count = min((sent - next + kTellers - 1) / kTellers, 32);
      __syncwarp();
      if (count <= 0) {
        __nanosleep(20);
        continue;
      }
      fence_system();
      if (__any_sync(~0U, has_failed(operation.control))) return;  // it need not be true any more
      const int word = (next + lane * kTellers) * p_.senders + static_cast<int>(blockIdx.x);
      for (int i = 1; i < operation.words.size && lane < count; ++i) {
        store_relaxed(p_.tell[rank_behind(i)] + word, operation_.epoch());
      }
      next += count * kTellers;
    }
  }

  // Behind the barrier that follows they come before the words of the first slice.
  __device__ __forceinline__ void send_scales() const {
    const int rank = p_.operation.words.rank;
    const auto step = static_cast<int>(blockDim.x) * p_.senders;
    for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < p_.rows[rank];
         i += step) {
      const float scale = p_.lhs_scale[rank][i];
      for (int peer = 0; peer < p_.operation.words.size; ++peer) {
        if (peer != rank) p_.scales_to[peer][i] = scale;
      }
    }
  }

  static constexpr int kElement = Config::In::kBytes;

  const FusedGatherParams& p_;
  const ProductOperation operation_;
  Shared& shared_;
  const uint32_t stages_;
  const int row_boxes_;
  const int slice_boxes_;  // along k
  const int boxes_;        // of this block
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fused_gather_kernel(__grid_constant__ const FusedGatherParams p) {
  extern __shared__ char shared[];
  __shared__ typename GatherSender<Config>::Shared sending;
  __shared__ uint32_t ready;
  if (threadIdx.x == 0) ready = 0;  // the product begins with a barrier
  if (static_cast<int>(blockIdx.x) < p.senders) {
    const uint32_t stages = (shared_address(shared) + 1023) & ~uint32_t{1023};
    GatherSender<Config>(p, sending, stages).run();
  }
  GatherWork<Config> work{p, ready};
  sm90::run_gemm<Config>(p.gemm, work, shared);
}

struct GatherKernel {
  template <typename Config>
  static const void* of() {
    return reinterpret_cast<const void*>(fused_gather_kernel<Config>);
  }
};

}  // namespace

const sm90::KernelInfo* find_fused_gather(const sm90::KernelKey& key) {
  using sm90::Tile;
  return sm90::find_instance<GatherKernel, Tile<128, 256, 2, 2, 2>, Tile<128, 224, 2, 2, 2>,
                             Tile<128, 192, 2, 2, 1, 2>, Tile<128, 128, 2, 1, 2>>(key);
}

cudaError_t launch_fused_gather(const sm90::KernelInfo& kernel, const FusedGatherParams& params,
                                int blocks, cudaStream_t stream) {
  return sm90::launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::cuda
