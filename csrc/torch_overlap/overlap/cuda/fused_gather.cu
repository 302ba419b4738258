#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/gemm/sm90/persistent_gemm.cuh"
#include "torch_overlap/overlap/cuda/product_operation.cuh"

// All-gather + GEMM in one kernel: the product of all rows, which waits for the rows of the other
// ranks. Either copy engines send them chunk by chunk; or the first blocks of the kernel send this
// rank's rows to all ranks, one slice of k after another, and compute tiles afterwards:
//
//   one thread     rows -> stage -> memory of each peer ...    TMA copies
//   four warps     fence after completed copies, then flags on the peers
//
// If the product has few waves of tiles, rows that arrive in slices are multiplied as they arrive:
// no tile waits for all of k of a chunk.
//
// With senders the kernel is an operation by itself. Block 0 signals to the peers that this rank
// has begun; senders wait until all peers have begun before they send. The last block to finish
// sets the epoch.
namespace torch_overlap::cuda {
namespace {

using sm90::load_acquire_shared;
using sm90::shared_address;
using sm90::store_release_shared;

// Iterates over the tiles, chunk by chunk in the order of arrival. All chunks share one schedule,
// so no wave of blocks ends at a chunk boundary. The last tiles belong to the blocks that send.
template <typename Config>
class GatherTileScheduler {
 public:
  __device__ __forceinline__ explicit GatherTileScheduler(const FusedGatherParams& p)
      : p_(p),
        at_(sends(p) ? p.num_nonsender_units + cluster_index()
                     : cluster_index() - sender_clusters(p)) {}

  __device__ __forceinline__ bool next(sm90::WorkTile& work_tile) {
    if (!sends(p_) && at_ >= p_.num_nonsender_units) return false;
    const int columns = sm90::ceil_div(p_.gemm.n, Config::kColumns);
    int place = at_;
    at_ += sends(p_) ? sender_clusters(p_)
                     : static_cast<int>(gridDim.x) / Config::kCluster - sender_clusters(p_);
#pragma unroll 1
    for (int step = 0; step < p_.operation.words.size; ++step) {
      const int chunk = p_.order[step];
      const int rows = sm90::ceil_div(p_.rows[chunk], Config::kRows * Config::kCluster);
      if (place < rows * columns) {
        work_tile = sm90::tile_for_index(place, rows, columns, p_.gemm.row_group,
                                         sm90::ceil_div(p_.gemm.k, Config::kDepth));
        if constexpr (Config::kCluster > 1) {
          work_tile.row = work_tile.row * Config::kCluster + static_cast<int>(sm90::cluster_rank());
        }
        work_tile.chunk = chunk;
        return true;
      }
      place -= rows * columns;
    }
    return false;
  }

 private:
  static __device__ __forceinline__ int cluster_index() {
    return static_cast<int>(blockIdx.x) / Config::kCluster;
  }
  static __device__ __forceinline__ int sender_clusters(const FusedGatherParams& p) {
    return p.senders / Config::kCluster;
  }
  static __device__ __forceinline__ bool sends(const FusedGatherParams& p) {
    return static_cast<int>(blockIdx.x) < p.senders;
  }

  const FusedGatherParams& p_;
  int at_;
};

// The thread that loads stages has no time to poll flags of other ranks: each poll costs a round
// trip to memory and a fence. Another warp polls 32 flags at once and publishes the number of
// stages that have arrived.
template <typename Config>
struct GatherPolicy {
  static constexpr sm90::AddendPosition kAddendPosition = sm90::AddendPosition::none;
  static constexpr bool kWaitsForPeers = true;
  const FusedGatherParams& p;
  uint32_t& ready;      // Stages that have arrived, over all units of this block in order.
  uint32_t before = 0;  // Stages of the units before this one.

  __device__ __forceinline__ GatherTileScheduler<Config> units(const sm90::GemmParams&) {
    return GatherTileScheduler<Config>(p);
  }
  __device__ __forceinline__ const CUtensorMap* lhs(const sm90::WorkTile& work_tile,
                                                    int& row) const {
    if (work_tile.chunk == p.operation.words.rank) return &p.gemm.lhs;
    row += p.begin[work_tile.chunk];
    return &p.gathered;
  }
  __device__ __forceinline__ int await(const sm90::WorkTile& work_tile, int k) const {
    uint32_t arrived;
    do {
      arrived = load_acquire_shared(ready) - before;
    } while (arrived <= static_cast<uint32_t>(k));
    return min(static_cast<int>(arrived), work_tile.depth);
  }
  __device__ __forceinline__ void on_tile_loaded(const sm90::WorkTile& work_tile) {
    before += work_tile.depth;
  }
  __device__ __forceinline__ const float* lhs_scale(const sm90::WorkTile& work_tile,
                                                    int& rows) const {
    rows = p.rows[work_tile.chunk];
    return p.lhs_scale[work_tile.chunk];
  }
  __device__ __forceinline__ void store(const sm90::WorkTile& work_tile, uint32_t from, int column,
                                        int row) {
    sm90::tma_store_2d(&p.out[work_tile.chunk], from, column, row);
  }

  // Called by one warp. After a failed wait everything counts as arrived, so no thread waits any
  // more.
  __device__ __forceinline__ void watch() const {
    const ProductOperation operation(p.operation, p.entry_flags);
    const bool has_senders = p.senders > 0;
    // epoch() is the stored epoch + 1. Without senders the begin kernel has already advanced it.
    const uint32_t epoch = has_senders ? operation.epoch() : operation.epoch() - 1;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    uint32_t complete = 1U << p.operation.words.rank;  // Bit mask of complete chunks.
    uint32_t all = 0;                                  // Stages of the units before this one.
    GatherTileScheduler<Config> units(p);
    sm90::WorkTile work_tile;
    while (units.next(work_tile)) {
      const int slices = sm90::ceil_div(work_tile.depth, p.slice_stages);
      const bool is_ready = (complete >> work_tile.chunk & 1) != 0;
      int polls = 0;
      for (int slice = is_ready ? slices : 0; slice < slices;) {
        const int arrived = count_slices(work_tile.chunk, slice, slices, epoch, lane);
        if (arrived == 0) {
          if (++polls % kSpinPolls == 0 && lane == 0) {
            await_slice(operation, work_tile.chunk, slice, epoch, has_senders);
          }
          __syncwarp();
          continue;
        }
        slice += arrived;
        if (lane == 0)
          store_release_shared(ready, all + min(slice * p.slice_stages, work_tile.depth));
      }
      complete |= 1U << work_tile.chunk;
      all += work_tile.depth;
      if (lane == 0) store_release_shared(ready, all);
    }
  }
  __device__ __forceinline__ void end() const {
    if (p.senders > 0) ProductOperation(p.operation, p.entry_flags).end();
  }

 private:
  // Flags per slice.
  __device__ __forceinline__ int writers() const { return max(p.senders, 1); }
  // Returns the number of consecutive slices, from `slice` on, that have arrived. One poll reads
  // the flags of all writers of several slices.
  __device__ __forceinline__ int count_slices(int chunk, int slice, int slices, uint32_t epoch,
                                              int lane) const {
    const int max_slices = min(32 / writers(), slices - slice);
    const bool is_due = lane < max_slices * writers();
    const uint32_t* const words = p.notified[chunk] + slice * writers();
    const bool is_missing = is_due && !has_reached(load_acquire(words + lane), epoch) &&
                            !has_failed(p.operation.control);
    const int first = __ffs(static_cast<int>(__ballot_sync(~0U, is_missing))) - 1;
    sm90::fence_proxy_async_global();
    __syncwarp();
    return first < 0 ? max_slices : first / writers();
  }
  // Waits first until the rank has begun, if ranks signal that: a timeout then reports that wait.
  __device__ __forceinline__ void await_slice(const ProductOperation& operation, int chunk,
                                              int slice, uint32_t epoch, bool has_senders) const {
    if (has_senders) operation.wait_begin(chunk);
#pragma unroll 1
    for (int i = 0; i < writers(); ++i) {
      await_late_word(p.operation.words, p.notified[chunk] + slice * writers() + i, epoch,
                      WaitKind::chunk, chunk, p.operation.control, kAllBlocksHostPollIntervalNs);
    }
  }
};

// A block that sends its part of this rank's rows to all peers: every p.senders-th box. Boxes are
// numbered down the rows first, and then along k.
template <typename Config>
class GatherSender {
  static constexpr int kBoxBytes = kSendBoxRows * kSendBoxBytes;
  static constexpr int kStages = 24;
  // Maximum number of copies whose source may still be read when another one has been issued, and
  // maximum number that may be in flight to the peers.
  static constexpr int kMaxReads = 2;
  static constexpr int kMaxInFlight = 4;
  static constexpr int kSignalWarps = 4;  // Warps that signal the peers.
  static_assert(kStages * kBoxBytes + 1024 <= Config::kSharedBytes && kMaxReads < kStages);
  static_assert(kStages <= 32, "a warp loads the first boxes");
  static_assert(32 * (1 + kSignalWarps) <= Config::kThreads);

 public:
  struct Shared {
    uint64_t loaded[kStages];
    uint32_t sent;  // Number of slices whose copies have completed.
    uint32_t failed;
  };

  __device__ __forceinline__ GatherSender(const FusedGatherParams& p, Shared& shared,
                                          uint32_t stages)
      : p_(p),
        operation_(p.operation, p.entry_flags),
        shared_(shared),
        stages_(stages),
        row_boxes_(sm90::ceil_div(p.rows[p.operation.words.rank], kSendBoxRows)),
        slice_boxes_(p.slice_stages / kStagesPerBox),
        boxes_(sm90::ceil_div(
            row_boxes_ * sm90::ceil_div(p.gemm.k, kColumns) - static_cast<int>(blockIdx.x),
            p.senders)) {}

  // Called by all threads. The block's shared memory is free afterwards.
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
    if (warp == 0 && lane < kStages) load(lane);  // Overlaps with the exchange of entry flags.
    if (blockIdx.x == 0 && warp == 1) operation_.signal_begin(lane);
    if (blockIdx.x == 0 && warp == 3 && lane == 0) operation_.mark_busy();
    const bool has_rows = row_boxes_ > 0;  // Else the peers' entries may be overwritten.
    if (has_rows && warp == 2 && is_peer(p_.operation.words, lane) &&
        !operation_.wait_ready_to_send(lane)) {
      shared_.failed = 1;
    }
    __syncthreads();
    const bool is_good = shared_.failed == 0;
    if (is_good && p_.scales_to[p_.operation.words.rank] != nullptr) send_scales();
    __syncthreads();
    if (copies) send(is_good);
    if (warp >= 1 && warp <= kSignalWarps && is_good) signal_slices(warp - 1, lane);
    __syncthreads();
  }

 private:
  static constexpr int kStagesPerBox = kSendBoxBytes / 128;
  static constexpr int kColumns = kStagesPerBox * Config::kDepth;  // Columns of a box.

  // Position of this block's i-th box.
  struct Box {
    int row;
    int column;
    int slice;

    __device__ __forceinline__ Box(const GatherSender& from, int i) {
      const int number = static_cast<int>(blockIdx.x) + i * from.p_.senders;
      const int k_box = number / from.row_boxes_;
      row = number - k_box * from.row_boxes_;
      column = k_box * kColumns;
      slice = k_box / from.slice_boxes_;
    }
  };

  // Returns the rank that follows this one by `ranks` (at least 1), modulo the number of ranks.
  __device__ __forceinline__ int next_rank(int ranks) const {
    const int rank = p_.operation.words.rank + ranks;
    return rank < p_.operation.words.size ? rank : rank - p_.operation.words.size;
  }

  // Loads the i-th box into shared memory.
  __device__ __forceinline__ void load(int i) const {
    if (i >= boxes_) return;
    const Box box(*this, i);
    const uint32_t barrier = shared_address(&shared_.loaded[i % kStages]);
    sm90::barrier_arrive_expect_tx(barrier, kBoxBytes);
    sm90::tma_load_2d(stages_ + i % kStages * kBoxBytes, &p_.own, barrier,
                      box.column * kElement / kSendElementBytes, box.row * kSendBoxRows);
  }

  __device__ __forceinline__ void send(bool is_good) const {
    if (boxes_ > 0)
      store_release_shared(shared_.sent, Box(*this, 0).slice);  // No boxes of earlier slices.
    sm90::fence_proxy_async_global();  // Orders the peers' earlier reads before these stores.
    const int size = p_.operation.words.size;
    for (int i = 0; i < boxes_; ++i) {
      sm90::barrier_wait(shared_address(&shared_.loaded[i % kStages]), i / kStages & 1);
      const Box box(*this, i);
      for (int peer = 1; peer < size && is_good; ++peer) {
        sm90::tma_store_2d(&p_.to[next_rank(peer)], stages_ + i % kStages * kBoxBytes,
                           box.column * kElement / kSendElementBytes, box.row * kSendBoxRows);
      }
      sm90::bulk_commit_group();
      if (i >= kMaxReads) {
        sm90::bulk_wait_group_read<kMaxReads>();
        load(i - kMaxReads + kStages);
      }
      if (i >= kMaxInFlight) {
        sm90::bulk_wait_group<kMaxInFlight>();
        store_release_shared(
            shared_.sent, Box(*this, i - kMaxInFlight + 1).slice);  // Earlier slices have arrived.
      }
    }
    sm90::bulk_wait_group<0>();
    store_release_shared(shared_.sent, slices());
  }
  __device__ __forceinline__ int slices() const {
    return sm90::ceil_div(sm90::ceil_div(p_.gemm.k, Config::kDepth), p_.slice_stages);
  }

  // Signals to the peers which slices have arrived. Warp w signals slices w, w + kSignalWarps, ...
  // A fence takes long while copies of the same thread are in flight, so other threads signal. It
  // takes equally long for one slice and for many, so a warp signals all slices that are due after
  // one fence. The next warp does not wait for that fence to complete.
  __device__ __forceinline__ void signal_slices(int signal_warp, int lane) const {
    const OperationParams& operation = p_.operation;
    const int all = slices();
    for (int next = signal_warp; next < all;) {
      const auto sent = static_cast<int>(__shfl_sync(~0U, load_acquire_shared(shared_.sent), 0));
      const int count = min((sent - next + kSignalWarps - 1) / kSignalWarps, 32);
      __syncwarp();
      if (count <= 0) {
        __nanosleep(20);
        continue;
      }
      fence_system();
      if (__any_sync(~0U, has_failed(operation.control))) return;  // The data may be invalid now.
      const int word = (next + lane * kSignalWarps) * p_.senders + static_cast<int>(blockIdx.x);
      for (int i = 1; i < operation.words.size && lane < count; ++i) {
        store_relaxed(p_.peer_flags[next_rank(i)] + word, operation_.epoch());
      }
      next += count * kSignalWarps;
    }
  }

  // Sends the row scales. The barrier that follows orders them before the flags of the first slice.
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
  const int slice_boxes_;  // Boxes of a slice along k.
  const int boxes_;        // Boxes of this block.
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fused_gather_kernel(__grid_constant__ const FusedGatherParams p) {
  extern __shared__ char shared[];
  __shared__ typename GatherSender<Config>::Shared sending;
  __shared__ uint32_t ready;
  if (threadIdx.x == 0) ready = 0;  // The product begins with a barrier.
  if (static_cast<int>(blockIdx.x) < p.senders) {
    const uint32_t stages = (shared_address(shared) + 1023) & ~uint32_t{1023};
    GatherSender<Config>(p, sending, stages).run();
  }
  GatherPolicy<Config> work{p, ready};
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
  return sm90::find_kernel_instance<GatherKernel, Tile<128, 256, 2, 2, 2>, Tile<128, 224, 2, 2, 2>,
                                    Tile<128, 192, 2, 2, 1, 2>, Tile<128, 128, 2, 1, 2>>(key);
}

cudaError_t launch_fused_gather(const sm90::KernelInfo& kernel, const FusedGatherParams& params,
                                int blocks, cudaStream_t stream) {
  return sm90::launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::cuda
