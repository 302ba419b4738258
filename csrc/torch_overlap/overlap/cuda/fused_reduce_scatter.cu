#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/gemm/sm90/persistent_gemm.cuh"
#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/product_operation.cuh"

// GEMM + reduce-scatter in one kernel. Tiles of other ranks' rows are stored directly to their
// owner, and a flag after each. To tiles of this rank's rows the tiles of the peers are added
// before rounding. One tile in shared memory connects registers and global memory; the movers
// (three warps of the first warpgroup) and the two warpgroups that multiply pass it to each other:
//
//   tile of another rank
//     multiply    ... | sums -> shared | filled
//     movers                           | store to the owner | emptied | first mover sets the flag
//
//   tile of this rank's rows
//     multiply    ...          | sums += shared | taken ... (each peer) | result -> shared | filled
//     last mover  flag? loaded |                  flag? loaded          |
//     first mover                                                                          | stores
//
// The movers' stores to peers are ordinary stores. TMA stores would go through the unit that loads
// the next stages, and each one that waits for a link would delay those loads. The stores are
// paced: all blocks finish a tile at about the same time, and traffic that saturates the links also
// saturates the paths within the chip.
//
// This kernel is for ranks that share a GPU, and for problems whose transfers take less time than
// the products of the other ranks' rows, or that send little. Otherwise products of pieces that
// copy engines send are faster (fused_reduce_scatter_sum.cu).
//
// The kernel is an operation by itself. Block 0 signals to the peers that this rank has begun. The
// movers wait until a peer has begun before they send it the first tile, while products run
// concurrently. The last block to finish sets the epoch.
//
// There is no circular wait. A rank computes all tiles of other ranks before any tile that waits.
// There are fewer blocks than SMs, so all blocks run once the work of other streams on their SMs
// has ended, for which two SMs are left free; and a block continues with its own tiles only after
// those of other ranks.
namespace torch_overlap::cuda {
namespace {

using sm90::WorkTile;

// Iterates over the tiles chunk by chunk, from the chunk of the next rank on; this rank's chunk is
// last. If chunks are equal, every rank sends to a different rank at any time.
template <typename Config>
class ScatterTileScheduler {
 public:
  __device__ __forceinline__ explicit ScatterTileScheduler(const FusedReduceScatterParams& p)
      : p_(p),
        columns_(sm90::ceil_div(p.gemm.n, Config::kColumns)),
        depth_(sm90::ceil_div(p.gemm.k, Config::kDepth)),
        of_chunk_(p.max_row_tiles * columns_),
        at_(static_cast<int>(blockIdx.x)) {}

  __device__ __forceinline__ bool next(WorkTile& work_tile) {
    const int size = p_.operation.words.size;
    while (at_ < of_chunk_ * size) {
      const int place = at_;
      at_ += static_cast<int>(gridDim.x);
      work_tile = sm90::tile_for_index(place % of_chunk_, p_.max_row_tiles, columns_,
                                       p_.gemm.row_group, depth_);
      work_tile.chunk = (p_.operation.words.rank + 1 + place / of_chunk_) % size;
      if (work_tile.row * Config::kRows < p_.rows[work_tile.chunk])
        return true;  // The chunk is long enough.
    }
    return false;
  }
  // Returns the index of a tile's flag.
  __device__ __forceinline__ int word(const WorkTile& work_tile) const {
    return work_tile.row * columns_ + work_tile.column;
  }

 private:
  const FusedReduceScatterParams& p_;
  const int columns_;
  const int depth_;
  const int of_chunk_;
  int at_;
};

struct TileBarriers {
  uint64_t filled;   // Arrivals of the eight MMA warps: outputs are ready to be stored.
  uint64_t emptied;  // Arrivals of the movers: the outputs have been read.
  uint64_t loaded;   // Bytes of a peer's tile.
  uint64_t taken;    // Arrivals of the eight MMA warps: the peer's tile has been read.
};

template <typename Config>
struct ScatterPolicy {
  static constexpr bool kWaitsForPeers = false;
  const FusedReduceScatterParams& p;
  __device__ __forceinline__ ScatterTileScheduler<Config> units(const sm90::GemmParams&) {
    return ScatterTileScheduler<Config>(p);
  }
  __device__ __forceinline__ const CUtensorMap* lhs(const WorkTile& work_tile, int& row) {
    row += p.first[work_tile.chunk];
    return &p.gemm.lhs;
  }
};

// Position in the tile of piece `i` (64 x 64). Shared memory has all pieces of the first warpgroup,
// then all of the second.
template <typename Config>
struct Piece {
  static constexpr int kPiecesPerGroup = Config::kPieces;
  static constexpr int kCount = 2 * kPiecesPerGroup;
  int row;
  int column;
  __device__ __forceinline__ explicit Piece(int i) {
    const int group = i / kPiecesPerGroup;
    const int inside = i % kPiecesPerGroup;
    row = group / Config::kColumnGroups * 64;
    column = group % Config::kColumnGroups * Config::kWidth + inside * 64;
  }
};

// Three warps that store tiles to their owners. The first one also signals the owners and stores
// this rank's tiles. The last one loads the peers' tiles for these, while the first one may still
// wait until the stores that it signals are complete.
template <typename Config>
class Mover {
  using P = Piece<Config>;

 public:
  __device__ __forceinline__ Mover(const FusedReduceScatterParams& p, uint32_t tile,
                                   TileBarriers& barriers, int warp)
      : p_(p),
        barriers_(barriers),
        tile_(tile),
        operation_(p.operation, p.entry_flags),
        warp_(warp),
        lane_(static_cast<int>(threadIdx.x) % 32),
        scheduler_(p) {}

  __device__ __forceinline__ void run() {
    if (blockIdx.x == 0 && warp_ == 0) {
      if (lane_ == 0) operation_.mark_busy();
      __syncwarp();
      operation_.signal_begin(lane_);
    }
    WorkTile work_tile;
    bool has_unit = scheduler_.next(work_tile);
    uint32_t fills = 0;
    while (has_unit) {
      WorkTile following;
      const bool has_following = scheduler_.next(following);
      const bool own = work_tile.chunk == p_.operation.words.rank;
      if (own && takes()) {
        if (fills > 0) wait_emptied(fills - 1);
        take_others(work_tile);
      }
      __syncwarp();
      sm90::barrier_wait(sm90::shared_address(&barriers_.filled), fills & 1);
      __syncwarp();
      if (!own) {
        const bool sends_next = has_following && following.chunk != p_.operation.words.rank;
        if (wait_peer_begin(work_tile.chunk)) {
          send(work_tile, sends_next ? p_.pace_ns : p_.last_pace_ns);
        } else if (lane_ == 0) {
          empty();
        }
        if (leads()) signal_tile(work_tile, fills);
      } else if (leads()) {
        store_result(work_tile);
      } else if (lane_ == 0) {
        empty();
      }
      ++fills;
      work_tile = following;
      has_unit = has_following;
    }
    if (!leads()) return;
    sm90::bulk_wait_group<0>();
    operation_.end();
  }

 private:
  __device__ __forceinline__ bool leads() const { return warp_ == 0 && lane_ == 0; }
  __device__ __forceinline__ bool takes() const { return warp_ == kMovers - 1 && lane_ == 0; }
  __device__ __forceinline__ void empty() {
    sm90::barrier_arrive(sm90::shared_address(&barriers_.emptied));
  }
  // Waits until all movers are done with the i-th tile.
  __device__ __forceinline__ void wait_emptied(uint32_t i) {
    sm90::barrier_wait(sm90::shared_address(&barriers_.emptied), i & 1);
  }

  // Called by the whole warp before it sends the first tile to a rank. Returns false if the rank
  // cannot be sent to.
  __device__ __forceinline__ bool wait_peer_begin(int peer) {
    if (peer == begun_peer_) return true;
    const bool is_good = __all_sync(~0U, lane_ != 0 || operation_.wait_ready_to_send(peer)) != 0;
    __syncwarp();  // Orders the stores of all lanes after the flag that one lane has read.
    if (is_good) begun_peer_ = peer;
    return is_good;
  }

  // Loads the tiles of the peers for one of this rank's, each after the previous one has been read.
  // The previous rank computes its tile first, the next rank last, so they are loaded in that
  // order.
  __device__ __forceinline__ void take_others(const WorkTile& work_tile) {
    const uint32_t loaded = sm90::shared_address(&barriers_.loaded);
    for (int i = 1; i < p_.operation.words.size; ++i) {
      const int peer =
          (p_.operation.words.rank + p_.operation.words.size - i) % p_.operation.words.size;
      const uint32_t* const word = p_.notified[peer] + scheduler_.word(work_tile);
      if (!has_reached(load_acquire(word), operation_.epoch())) {
        // Waits for the entry first, so that a timeout reports that wait.
        if (takes_ < static_cast<uint32_t>(i)) operation_.wait_begin(peer);
        await_word(p_.operation.words, word, operation_.epoch(), WaitKind::chunk, peer,
                   p_.operation.control, kAllBlocksHostPollIntervalNs);
      }
      sm90::fence_proxy_async_global();
      if (i > 1) sm90::barrier_wait(sm90::shared_address(&barriers_.taken), (takes_ - 1) & 1);
      ++takes_;
      sm90::barrier_arrive_expect_tx(loaded, P::kCount * Config::kStoreBytes);
      for (int k = 0; k < P::kCount; ++k) {
        const P piece(k);
        sm90::tma_load_2d(tile_ + k * Config::kStoreBytes, &p_.from[peer], loaded,
                          work_tile.column * Config::kColumns + piece.column,
                          work_tile.row * Config::kRows + piece.row);
      }
    }
  }

  __device__ __forceinline__ void store_result(const WorkTile& work_tile) {
    for (int k = 0; k < P::kCount; ++k) {
      const P piece(k);
      sm90::tma_store_2d(&p_.out, tile_ + k * Config::kStoreBytes,
                         work_tile.column * Config::kColumns + piece.column,
                         work_tile.row * Config::kRows + piece.row);
    }
    sm90::bulk_commit_group();
    sm90::bulk_wait_group_read<0>();
    empty();
  }

  // Stores this warp's part of the tile, kPacedRows rows at a time. Eight lanes store a row; a warp
  // stores four rows at once.
  __device__ __forceinline__ void send(const WorkTile& work_tile, uint32_t pace) {
    constexpr int kVectors = kPacedRows / 4;
    constexpr int kPartsPerPiece = 64 / kPacedRows;
    uint64_t next = pace != 0 ? now_ns() : 0;
    auto* const to = static_cast<typename Config::Out*>(p_.to[work_tile.chunk]);
    const int vector = lane_ % 8;
    const int rows = p_.rows[work_tile.chunk];
    for (int part = warp_; part < P::kCount * kPartsPerPiece; part += kMovers) {
      if (pace != 0) {
        next += pace;
        while (now_ns() < next) __nanosleep(50);
      }
      const P piece(part / kPartsPerPiece);
      const int first = part % kPartsPerPiece * kPacedRows + lane_ / 8;
      uint4 data[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int at = first + 4 * i;
        data[i] = sm90::load_vector(tile_ + part / kPartsPerPiece * Config::kStoreBytes + at * 128 +
                                    ((vector ^ (at & 7)) << 4));
      }
      const int column = work_tile.column * Config::kColumns + piece.column + vector * 8;
      const int row = work_tile.row * Config::kRows + piece.row + first;
      if (column >= p_.gemm.n) continue;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (row + 4 * i >= rows) continue;
        *reinterpret_cast<uint4*>(to + static_cast<int64_t>(row + 4 * i) * p_.gemm.n + column) =
            data[i];
      }
    }
    sm90::fence_proxy_async_shared();
    __syncwarp();
    if (lane_ == 0) empty();
  }

  // Signals to the owner that the i-th tile has arrived, after the stores of all movers.
  __device__ __forceinline__ void signal_tile(const WorkTile& work_tile, uint32_t i) {
    wait_emptied(i);
    if (has_failed(p_.operation.control)) return;  // The data may be invalid now.
    store_release(p_.peer_flags[work_tile.chunk] + scheduler_.word(work_tile), operation_.epoch());
  }

  const FusedReduceScatterParams& p_;
  TileBarriers& barriers_;
  const uint32_t tile_;
  const ProductOperation operation_;
  const int warp_;
  const int lane_;
  ScatterTileScheduler<Config> scheduler_;
  uint32_t takes_ = 0;
  int begun_peer_ = -1;  // Rank that is known to have begun.
};

// Processes the sums of a warpgroup. sm90::ConsumerLoop describes the interface.
template <typename Config>
class ScatterOutputs {
  static constexpr int kPieces = Config::kPieces;
  using Sums = float[Config::kAccumulators];

 public:
  static constexpr bool kPrefetchesAddends = false;
  static constexpr bool kAddsDuringMainloop = false;

  __device__ __forceinline__ ScatterOutputs(const FusedReduceScatterParams& p, uint32_t tile,
                                            TileBarriers& barriers, int group, int row, int column)
      : p_(p),
        group_(group),
        row_(row),
        column_(column),
        mine_at_(tile + group * kPieces * Config::kStoreBytes),
        barriers_(barriers) {
    if constexpr (Config::kIsScaled) scale_ = sm90::scale_of(p.gemm.epilogue);
  }

  __device__ __forceinline__ void complete(const WorkTile& work_tile, Sums& sums) {
    if constexpr (Config::kIsScaled) scale(work_tile, sums);
    if (work_tile.chunk == p_.operation.words.rank) {
#pragma unroll 1
      for (int i = 1; i < p_.operation.words.size; ++i) add_next(sums);
      if (p_.factor != 1.0F) sm90::multiply_by(p_.factor, sums);
      if (!p_.gemm.plain) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          sm90::apply_epilogue(p_.gemm, sums, i,
                               work_tile.column * Config::kColumns + column_ + 64 * i);
        }
      }
    }
  }
  __device__ __forceinline__ void store(const WorkTile& work_tile,
                                        const sm90::OutputFragment& fragment, int piece) {
    if (piece == 0) {
      // The peers' tiles that the mover loaded for this tile have been read: the memory is free.
      const bool has_room =
          work_tile.chunk == p_.operation.words.rank && p_.operation.words.size > 1;
      if (fills_ > 0 && !has_room) {
        sm90::barrier_wait(sm90::shared_address(&barriers_.emptied), (fills_ - 1) & 1);
      }
      ++fills_;
    }
    sm90::store_to_shared(fragment, mine_at_ + piece * Config::kStoreBytes);
    if (piece == kPieces - 1) arrive(barriers_.filled);
  }

 private:
  __device__ __forceinline__ void scale(const WorkTile& work_tile, Sums& sums) const {
    const sm90::Epilogue& e = p_.gemm.epilogue;
    if (e.scaled_by_row) {
      const int first = work_tile.row * Config::kRows + row_;
      sm90::scale_by_row(p_.gemm, sums, e.lhs_scale + p_.first[work_tile.chunk] + first,
                         p_.rows[work_tile.chunk] - first,
                         work_tile.column * Config::kColumns + column_);
    } else {
      sm90::multiply_by(scale_, sums);
    }
  }
  __device__ __forceinline__ void add_next(Sums& sums) {
    sm90::barrier_wait(sm90::shared_address(&barriers_.loaded), loads_ & 1);
    ++loads_;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      sm90::add_from_shared<Config>(sums, i, mine_at_ + i * Config::kStoreBytes);
    }
    arrive(barriers_.taken);
  }
  // Signals that this warp has written or read its part of the tile.
  static __device__ __forceinline__ void arrive(uint64_t& barrier) {
    sm90::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(sm90::shared_address(&barrier));
  }

  const FusedReduceScatterParams& p_;
  const int group_;
  const int row_;
  const int column_;
  const uint32_t mine_at_;
  TileBarriers& barriers_;
  uint32_t fills_ = 0;
  uint32_t loads_ = 0;
  float scale_ = 1.0F;  // Product of the scales of both operands.
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fused_reduce_scatter_kernel(__grid_constant__ const FusedReduceScatterParams p) {
  extern __shared__ char dynamic[];
  __shared__ sm90::SharedBarriers<Config> stages;
  __shared__ TileBarriers barriers;
  const uint32_t shared = (sm90::shared_address(dynamic) + 1023) & ~uint32_t{1023};
  const uint32_t tile = shared + Config::kStages * Config::kStageBytes;
  static_assert(Config::kCluster == 1 && Config::kStoreBuffers == Config::kPieces);
  static_assert(Config::kWidth % 64 == 0, "whole pieces");
  if (threadIdx.x == 0) {
    sm90::init_stages(stages);
    sm90::barrier_init(sm90::shared_address(&barriers.filled), sm90::kNumMmaWarps);
    sm90::barrier_init(sm90::shared_address(&barriers.emptied), kMovers);
    sm90::barrier_init(sm90::shared_address(&barriers.loaded), 1);
    sm90::barrier_init(sm90::shared_address(&barriers.taken), sm90::kNumMmaWarps);
    sm90::fence_barrier_init();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    sm90::warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) {
      ScatterPolicy<Config> work{p};
      sm90::load_tiles<Config>(p.gemm, work, shared, stages);
    } else if (threadIdx.x >= 32) {
      Mover<Config>(p, tile, barriers, static_cast<int>(threadIdx.x) / 32 - 1).run();
    }
  } else {
    sm90::warpgroup_reg_alloc<232>();
    sm90::MmaPipeline<Config> mine(shared, stages, group - 1);
    ScatterOutputs<Config> outputs(p, tile, barriers, group - 1, mine.row(), mine.column());
    sm90::ConsumerLoop<Config, ScatterTileScheduler<Config>, ScatterOutputs<Config>>(
        mine, ScatterTileScheduler<Config>(p), outputs)
        .run();
  }
}

struct ScatterKernel {
  template <typename Config>
  static const void* of() {
    return reinterpret_cast<const void*>(fused_reduce_scatter_kernel<Config>);
  }
};

}  // namespace

const sm90::KernelInfo* find_fused_reduce_scatter(const sm90::KernelKey& key) {
  using sm90::Tile;
  return sm90::find_kernel_instance<ScatterKernel, Tile<128, 256, 2, 1, 4>,
                                    Tile<128, 128, 2, 1, 2>>(key);
}

cudaError_t launch_fused_reduce_scatter(const sm90::KernelInfo& kernel,
                                        const FusedReduceScatterParams& params, int blocks,
                                        cudaStream_t stream) {
  return sm90::launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::cuda
