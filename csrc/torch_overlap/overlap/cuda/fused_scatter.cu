#include "torch_overlap/gemm/sm90/body.cuh"
#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/overlap/cuda/fused.h"
#include "torch_overlap/overlap/cuda/product_operation.cuh"

// GEMM + reduce-scatter in one kernel. The tiles of other ranks' rows are stored straight to their
// owner, with a word behind each; those of the own rows take the tiles of the others in before they
// are rounded. Between registers and the outside lies one tile in shared memory, which the movers
// (three warps of the first warpgroup) and the two warpgroups that multiply hand to each other:
//
//   tile of another rank
//     multiply    ... | sums -> shared | filled
//     movers                           | store to the owner | emptied | the first one tells it
//
//   tile of the own rows
//     multiply    ...          | sums += shared | taken ...  (of each) | result -> shared | filled
//     last mover  told? loaded |                  told? loaded         |
//     first mover                                                                         | stores
//
// The movers' stores to others are plain ones. As tensor copies they would be done by the unit that
// loads the next stages, and every one that waits for a link would hold those up. They are paced:
// all blocks end a tile at about the same time, and what fills the links fills the ways within the
// chip too.
//
// For ranks that share a GPU, and where links take less time than the products of the other ranks'
// rows, or little is sent: else products of pieces that copy engines send are quicker
// (fused_sum.cu).
//
// It is an operation by itself. Block 0 tells the others that this rank has begun; the movers wait
// for another rank to have before they send it the first tile, with products under way beside them.
// The last block to end sets the epoch.
//
// A rank computes all tiles of others before any that waits. There are fewer blocks than SMs, so
// all of them run once what other streams have there has ended, which two SMs are left for; and one
// goes on to its own tiles only behind those of others: nothing waits in a circle.
namespace torch_overlap::cuda {
namespace {

using sm90::Unit;

// The tiles of the chunks one after the other, from that of the next rank on, the own ones last.
// Where chunks are equal, every rank sends to another one at any time.
template <typename Config>
class ScatterUnits {
 public:
  __device__ __forceinline__ explicit ScatterUnits(const FusedScatterParams& p)
      : p_(p),
        columns_(sm90::ceil_div(p.gemm.n, Config::kColumns)),
        depth_(sm90::ceil_div(p.gemm.k, Config::kDepth)),
        of_chunk_(p.most_row_tiles * columns_),
        at_(static_cast<int>(blockIdx.x)) {}

  __device__ __forceinline__ bool next(Unit& unit) {
    const int size = p_.operation.words.size;
    while (at_ < of_chunk_ * size) {
      const int place = at_;
      at_ += static_cast<int>(gridDim.x);
      unit =
          sm90::tile_at(place % of_chunk_, p_.most_row_tiles, columns_, p_.gemm.row_group, depth_);
      unit.chunk = (p_.operation.words.rank + 1 + place / of_chunk_) % size;
      if (unit.row * Config::kRows < p_.rows[unit.chunk]) return true;  // else the chunk is shorter
    }
    return false;
  }
  // The word of a tile.
  __device__ __forceinline__ int word(const Unit& unit) const {
    return unit.row * columns_ + unit.column;
  }

 private:
  const FusedScatterParams& p_;
  const int columns_;
  const int depth_;
  const int of_chunk_;
  int at_;
};

struct TileBarriers {
  uint64_t filled;   // by the eight warps: outputs are there to be stored
  uint64_t emptied;  // by the movers: they have been read
  uint64_t loaded;   // bytes of a tile of another rank
  uint64_t taken;    // by the eight warps: it has been read
};

template <typename Config>
struct ScatterWork {
  static constexpr bool kAwaits = false;
  const FusedScatterParams& p;
  __device__ __forceinline__ ScatterUnits<Config> units(const sm90::GemmParams&) {
    return ScatterUnits<Config>(p);
  }
  __device__ __forceinline__ const CUtensorMap* lhs(const Unit& unit, int& row) {
    row += p.first[unit.chunk];
    return &p.gemm.lhs;
  }
};

// Where piece `i` (64 x 64) of the tile lies, as the warpgroups write it: first all of one, then
// all of the other.
template <typename Config>
struct Piece {
  static constexpr int kOfGroup = Config::kPieces;
  static constexpr int kCount = 2 * kOfGroup;
  int row;
  int column;
  __device__ __forceinline__ explicit Piece(int i) {
    const int group = i / kOfGroup;
    const int inside = i % kOfGroup;
    row = group / Config::kColumnGroups * 64;
    column = group % Config::kColumnGroups * Config::kWidth + inside * 64;
  }
};

// Three warps, which store tiles to their owners. The first one also tells the owners, and stores
// the own tiles; the last one loads what the others have sent for these, while the first still
// waits until links have taken what it tells of.
template <typename Config>
class Mover {
  using P = Piece<Config>;

 public:
  __device__ __forceinline__ Mover(const FusedScatterParams& p, uint32_t tile,
                                   TileBarriers& barriers, int warp)
      : p_(p),
        barriers_(barriers),
        tile_(tile),
        operation_(p.operation, p.begun),
        warp_(warp),
        lane_(static_cast<int>(threadIdx.x) % 32),
        units_(p) {}

  __device__ __forceinline__ void run() {
    if (blockIdx.x == 0 && warp_ == 0) {
      if (lane_ == 0) operation_.check_alone();
      __syncwarp();
      operation_.tell_begun(lane_);
    }
    Unit unit;
    bool has_unit = units_.next(unit);
    uint32_t fills = 0;
    while (has_unit) {
      Unit following;
      const bool has_following = units_.next(following);
      const bool own = unit.chunk == p_.operation.words.rank;
      if (own && takes()) {
        if (fills > 0) wait_emptied(fills - 1);
        take_others(unit);
      }
      __syncwarp();
      sm90::barrier_wait(sm90::shared_address(&barriers_.filled), fills & 1);
      __syncwarp();
      if (!own) {
        const bool sends_next = has_following && following.chunk != p_.operation.words.rank;
        if (has_begun(unit.chunk)) {
          send(unit, sends_next ? p_.pace_ns : p_.last_pace_ns);
        } else if (lane_ == 0) {
          empty();
        }
        if (leads()) tell(unit, fills);
      } else if (leads()) {
        store_result(unit);
      } else if (lane_ == 0) {
        empty();
      }
      ++fills;
      unit = following;
      has_unit = has_following;
    }
    if (!leads()) return;
    sm90::stores_done<0>();
    operation_.end();
  }

 private:
  __device__ __forceinline__ bool leads() const { return warp_ == 0 && lane_ == 0; }
  __device__ __forceinline__ bool takes() const { return warp_ == kMovers - 1 && lane_ == 0; }
  __device__ __forceinline__ void empty() {
    sm90::barrier_arrive(sm90::shared_address(&barriers_.emptied));
  }
  // Until all movers are done with the i-th tile.
  __device__ __forceinline__ void wait_emptied(uint32_t i) {
    sm90::barrier_wait(sm90::shared_address(&barriers_.emptied), i & 1);
  }

  // Before the first tile for a rank; of the whole warp.
  __device__ __forceinline__ bool has_begun(int peer) {
    if (peer == begun_) return true;
    const bool is_good = __all_sync(~0U, lane_ != 0 || operation_.may_send(peer)) != 0;
    __syncwarp();  // what the others store comes behind what the one has seen
    if (is_good) begun_ = peer;
    return is_good;
  }

  // The tiles of the other ranks for an own one, each when the one before has been read. That of
  // the rank before was computed first, that of the next one last.
  __device__ __forceinline__ void take_others(const Unit& unit) {
    const uint32_t loaded = sm90::shared_address(&barriers_.loaded);
    for (int i = 1; i < p_.operation.words.size; ++i) {
      const int peer =
          (p_.operation.words.rank + p_.operation.words.size - i) % p_.operation.words.size;
      const uint32_t* const word = p_.told[peer] + units_.word(unit);
      if (!reached(load_acquire(word), operation_.epoch())) {
        // So that this is what expires.
        if (takes_ < static_cast<uint32_t>(i)) operation_.await_begun(peer);
        await_word(p_.operation.words, word, operation_.epoch(), WaitKind::chunk, peer,
                   p_.operation.control, kManyLookAtHostNs);
      }
      sm90::fence_global_for_copies();
      if (i > 1) sm90::barrier_wait(sm90::shared_address(&barriers_.taken), (takes_ - 1) & 1);
      ++takes_;
      sm90::barrier_expect(loaded, P::kCount * Config::kStoreBytes);
      for (int k = 0; k < P::kCount; ++k) {
        const P piece(k);
        sm90::tensor_load(tile_ + k * Config::kStoreBytes, &p_.from[peer], loaded,
                          unit.column * Config::kColumns + piece.column,
                          unit.row * Config::kRows + piece.row);
      }
    }
  }

  __device__ __forceinline__ void store_result(const Unit& unit) {
    for (int k = 0; k < P::kCount; ++k) {
      const P piece(k);
      sm90::tensor_store(&p_.out, tile_ + k * Config::kStoreBytes,
                         unit.column * Config::kColumns + piece.column,
                         unit.row * Config::kRows + piece.row);
    }
    sm90::store_commit();
    sm90::stores_read<0>();
    empty();
  }

  // This warp's part of the tile, kPacedRows at a time: four rows by eight lanes each.
  __device__ __forceinline__ void send(const Unit& unit, uint32_t pace) {
    constexpr int kVectors = kPacedRows / 4;
    constexpr int kInPiece = 64 / kPacedRows;
    uint64_t next = pace != 0 ? now_ns() : 0;
    auto* const to = static_cast<typename Config::Out*>(p_.to[unit.chunk]);
    const int vector = lane_ % 8;
    const int rows = p_.rows[unit.chunk];
    for (int part = warp_; part < P::kCount * kInPiece; part += kMovers) {
      if (pace != 0) {
        next += pace;
        while (now_ns() < next) __nanosleep(50);
      }
      const P piece(part / kInPiece);
      const int first = part % kInPiece * kPacedRows + lane_ / 8;
      uint4 data[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int at = first + 4 * i;
        data[i] = sm90::load_vector(tile_ + part / kInPiece * Config::kStoreBytes + at * 128 +
                                    ((vector ^ (at & 7)) << 4));
      }
      const int column = unit.column * Config::kColumns + piece.column + vector * 8;
      const int row = unit.row * Config::kRows + piece.row + first;
      if (column >= p_.gemm.n) continue;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (row + 4 * i >= rows) continue;
        *reinterpret_cast<uint4*>(to + static_cast<int64_t>(row + 4 * i) * p_.gemm.n + column) =
            data[i];
      }
    }
    sm90::fence_shared_for_copies();
    __syncwarp();
    if (lane_ == 0) empty();
  }

  // The owner of the i-th tile that it is there: behind the stores of all movers.
  __device__ __forceinline__ void tell(const Unit& unit, uint32_t i) {
    wait_emptied(i);
    if (has_failed(p_.operation.control)) return;  // what this rank would tell need not be true
    store_release(p_.tell[unit.chunk] + units_.word(unit), operation_.epoch());
  }

  const FusedScatterParams& p_;
  TileBarriers& barriers_;
  const uint32_t tile_;
  const ProductOperation operation_;
  const int warp_;
  const int lane_;
  ScatterUnits<Config> units_;
  uint32_t takes_ = 0;
  int begun_ = -1;  // the rank that is known to have begun
};

// What becomes of a warpgroup's sums: see sm90::Tiles.
template <typename Config>
class ScatterOutputs {
  static constexpr int kPieces = Config::kPieces;
  using Sums = float[Config::kAccumulators];

 public:
  static constexpr bool kFetches = false;
  static constexpr bool kAddsBetween = false;

  __device__ __forceinline__ ScatterOutputs(const FusedScatterParams& p, uint32_t tile,
                                            TileBarriers& barriers, int group, int row, int column)
      : p_(p),
        group_(group),
        row_(row),
        column_(column),
        mine_at_(tile + group * kPieces * Config::kStoreBytes),
        barriers_(barriers) {
    if constexpr (Config::kIsScaled) scale_ = sm90::scale_of(p.gemm.epilogue);
  }

  __device__ __forceinline__ void complete(const Unit& unit, Sums& sums) {
    if constexpr (Config::kIsScaled) scale(unit, sums);
    if (unit.chunk == p_.operation.words.rank) {
#pragma unroll 1
      for (int i = 1; i < p_.operation.words.size; ++i) add_next(sums);
      if (p_.factor != 1.0F) sm90::multiply_by(p_.factor, sums);
      if (!p_.gemm.plain) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          sm90::apply_epilogue(p_.gemm, sums, i, unit.column * Config::kColumns + column_ + 64 * i);
        }
      }
    }
  }
  __device__ __forceinline__ void put(const Unit& unit, const sm90::Rounded& rounded, int piece) {
    if (piece == 0) {
      // What the mover has loaded for an own tile has been read: there is room.
      const bool has_room = unit.chunk == p_.operation.words.rank && p_.operation.words.size > 1;
      if (fills_ > 0 && !has_room) {
        sm90::barrier_wait(sm90::shared_address(&barriers_.emptied), (fills_ - 1) & 1);
      }
      ++fills_;
    }
    sm90::put_to_shared(rounded, mine_at_ + piece * Config::kStoreBytes);
    if (piece == kPieces - 1) arrive(barriers_.filled);
  }

 private:
  __device__ __forceinline__ void scale(const Unit& unit, Sums& sums) const {
    const sm90::Epilogue& e = p_.gemm.epilogue;
    if (e.scaled_by_row) {
      const int first = unit.row * Config::kRows + row_;
      sm90::scale_by_row(p_.gemm, sums, e.lhs_scale + p_.first[unit.chunk] + first,
                         p_.rows[unit.chunk] - first, unit.column * Config::kColumns + column_);
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
  // This warp has written, or read, its part of the tile.
  static __device__ __forceinline__ void arrive(uint64_t& barrier) {
    sm90::fence_shared_for_copies();
    __syncwarp();
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(sm90::shared_address(&barrier));
  }

  const FusedScatterParams& p_;
  const int group_;
  const int row_;
  const int column_;
  const uint32_t mine_at_;
  TileBarriers& barriers_;
  uint32_t fills_ = 0;
  uint32_t loads_ = 0;
  float scale_ = 1.0F;  // of both operands
};

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fused_scatter_kernel(__grid_constant__ const FusedScatterParams p) {
  extern __shared__ char dynamic[];
  __shared__ sm90::SharedBarriers<Config> stages;
  __shared__ TileBarriers barriers;
  const uint32_t shared = (sm90::shared_address(dynamic) + 1023) & ~uint32_t{1023};
  const uint32_t tile = shared + Config::kStages * Config::kStageBytes;
  static_assert(Config::kCluster == 1 && Config::kStoreBuffers == Config::kPieces);
  static_assert(Config::kWidth % 64 == 0, "whole pieces");
  if (threadIdx.x == 0) {
    sm90::init_stages(stages);
    sm90::barrier_init(sm90::shared_address(&barriers.filled), sm90::kMultiplyingWarps);
    sm90::barrier_init(sm90::shared_address(&barriers.emptied), kMovers);
    sm90::barrier_init(sm90::shared_address(&barriers.loaded), 1);
    sm90::barrier_init(sm90::shared_address(&barriers.taken), sm90::kMultiplyingWarps);
    sm90::fence_barrier_init();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    sm90::fewer_registers<40>();
    if (threadIdx.x == 0) {
      ScatterWork<Config> work{p};
      sm90::load_units<Config>(p.gemm, work, shared, stages);
    } else if (threadIdx.x >= 32) {
      Mover<Config>(p, tile, barriers, static_cast<int>(threadIdx.x) / 32 - 1).run();
    }
  } else {
    sm90::more_registers<232>();
    sm90::Multiplier<Config> mine(shared, stages, group - 1);
    ScatterOutputs<Config> outputs(p, tile, barriers, group - 1, mine.row(), mine.column());
    sm90::Tiles<Config, ScatterUnits<Config>, ScatterOutputs<Config>>(mine, ScatterUnits<Config>(p),
                                                                      outputs)
        .run();
  }
}

struct ScatterKernel {
  template <typename Config>
  static const void* of() {
    return reinterpret_cast<const void*>(fused_scatter_kernel<Config>);
  }
};

}  // namespace

const sm90::KernelInfo* find_fused_scatter(const sm90::KernelKey& key) {
  using sm90::Tile;
  return sm90::find_instance<ScatterKernel, Tile<128, 256, 2, 1, 4>, Tile<128, 128, 2, 1, 2>>(key);
}

cudaError_t launch_fused_scatter(const sm90::KernelInfo& kernel, const FusedScatterParams& params,
                                 int blocks, cudaStream_t stream) {
  return sm90::launch(kernel, params, blocks, stream);
}

}  // namespace torch_overlap::cuda
