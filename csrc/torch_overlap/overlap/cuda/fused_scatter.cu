#include "torch_overlap/gemm/sm90/body.cuh"
#include "torch_overlap/gemm/sm90/instance.cuh"
#include "torch_overlap/overlap/cuda/await.cuh"
#include "torch_overlap/overlap/cuda/fused.h"

// GEMM + reduce-scatter in one kernel. The tiles of other ranks' rows are stored straight to their
// owner by tensor copies, with a word behind each; those of the own rows take the tiles of the
// others in before they are rounded. Between registers and the outside lies one tile in shared
// memory, which the mover (one thread of the first warpgroup) and the two that multiply hand to
// each other:
//
//   tile of another rank
//     multiply    ... | sums -> shared | filled
//     mover                              stores | emptied | all written: tell the owner
//
//   tile of the own rows
//     multiply    ...          | sums += shared | taken ... | result -> shared | filled
//     mover       told? loaded |                  told? loaded                   stores
//
// Where there are many tiles, those of the others have come long before, and all but the last are
// added while the own one is multiplied, at fixed places along k.
//
// What a tile of the own rows waits for is computed by the others before any tile of theirs that
// comes later in the order, and those wait for earlier ones of this rank: nothing waits in a
// circle.
namespace torch_overlap::cuda {
namespace {

using sm90::Unit;

// The tiles of the other chunks in turn, then those of the own. All ranks are at the same place of
// their chunks at the same time, so every owner gets tiles at an even rate, and what others have
// computed for this rank has come long before it is asked for.
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
    const int size = p_.words.size;
    while (at_ < of_chunk_ * size) {
      const int place = at_;
      at_ += static_cast<int>(gridDim.x);
      const int of_others = of_chunk_ * (size - 1);
      const bool own = place >= of_others;
      const int tile = own ? place - of_others : place / (size - 1);
      const int turn = own ? size - 1 : place % (size - 1);
      unit = sm90::tile_at(tile, p_.most_row_tiles, columns_, p_.gemm.row_group, depth_);
      unit.chunk = (p_.words.rank + 1 + turn) % size;
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
  uint64_t emptied;  // by the mover: they have been read
  uint64_t loaded;   // bytes of a tile of another rank
  uint64_t taken;    // by the eight warps: it has been read
};

template <typename Config>
struct ScatterWork {
  const FusedScatterParams& p;
  __device__ __forceinline__ ScatterUnits<Config> units(const sm90::GemmParams&) {
    return ScatterUnits<Config>(p);
  }
  __device__ __forceinline__ const CUtensorMap* lhs(const Unit& unit, int& row) {
    row += p.begin[unit.chunk];
    return &p.gemm.lhs;
  }
};

// Where piece `i` (64 x 64) of the tile lies, as the warpgroups write it: first all of one, then
// all of the other.
template <typename Config>
struct Piece {
  static constexpr int kOfGroup = Config::kRepeats * Config::kChunks;
  static constexpr int kCount = 2 * kOfGroup;
  int row;
  int column;
  __device__ __forceinline__ explicit Piece(int i) {
    const int group = i / kOfGroup;
    const int inside = i % kOfGroup;
    row = (group / Config::kColumnGroups * Config::kRepeats + inside / Config::kChunks) * 64;
    column = group % Config::kColumnGroups * Config::kWidth + inside % Config::kChunks * 64;
  }
};

template <typename Config>
__device__ __forceinline__ void move_tiles(const FusedScatterParams& p, uint32_t tile,
                                           TileBarriers& barriers) {
  using P = Piece<Config>;
  const uint32_t epoch = *p.words.epoch;
  const uint32_t filled = sm90::shared_address(&barriers.filled);
  const uint32_t emptied = sm90::shared_address(&barriers.emptied);
  const uint32_t loaded = sm90::shared_address(&barriers.loaded);
  const uint32_t taken = sm90::shared_address(&barriers.taken);
  uint32_t fills = 0;
  uint32_t takes = 0;
  uint64_t next = 0;
  ScatterUnits<Config> units(p);
  Unit unit;
  while (units.next(unit)) {
    const int row = unit.row * Config::kRows;
    const int column = unit.column * Config::kColumns;
    const bool own = unit.chunk == p.words.rank;
    if (own) {
      for (int i = 1; i < p.words.size; ++i) {
        const int peer = (p.words.rank + i) % p.words.size;
        await_word(p.words, p.told[peer] + units.word(unit), epoch, WaitKind::chunk, peer,
                   p.control, kManyLookAtHostNs);
        sm90::fence_global_for_copies();
        if (i > 1) sm90::barrier_wait(taken, (takes - 1) & 1);
        ++takes;
        sm90::barrier_expect(loaded, P::kCount * Config::kStoreBytes);
        for (int k = 0; k < P::kCount; ++k) {
          const P piece(k);
          sm90::tensor_load(tile + k * Config::kStoreBytes, &p.from[peer], loaded,
                            column + piece.column, row + piece.row);
        }
      }
    }
    sm90::barrier_wait(filled, fills & 1);
    ++fills;
    // Others wait for the last tiles, and nothing is loaded behind them.
    ScatterUnits<Config> ahead = units;
    Unit following;
    const bool paced =
        !own && p.pace_ns != 0 && ahead.next(following) && following.chunk != p.words.rank;
    for (int k = 0; k < P::kCount; ++k) {
      const P piece(k);
      if (paced) {
        while (now_ns() < next) __nanosleep(100);
        next = now_ns() + p.pace_ns;
      }
      sm90::tensor_store(&p.to[unit.chunk], tile + k * Config::kStoreBytes, column + piece.column,
                         row + piece.row);
    }
    sm90::store_commit();
    sm90::stores_read<0>();
    sm90::barrier_arrive(emptied);
    if (own) continue;
    sm90::stores_done<0>();
    if (has_failed(p.control)) continue;  // what this rank would tell need not be true
    sm90::fence_global_for_copies();
    __threadfence_system();
    store_release(p.tell[unit.chunk] + units.word(unit), epoch);
  }
  sm90::stores_done<0>();
}

// sums += what another rank has stored, as round_to_shared() would have put it there.
template <typename Config>
__device__ __forceinline__ void add_from_shared(float (&sums)[Config::kAccumulators], int chunk,
                                                uint32_t from) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int first = (static_cast<int>(threadIdx.x) / 32 % 4) * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t at = ((i ^ (first & 7)) << 4) + (lane & 3) * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t both;
      asm volatile("ld.shared.u32 %0, [%1];"
                   : "=r"(both)
                   : "r"(from + (first + 8 * half) * 128 + at)
                   : "memory");
      float a;
      float b;
      sm90::unpack(typename Config::Out{}, both, a, b);
      sums[(chunk * 8 + i) * 4 + 2 * half] += a;
      sums[(chunk * 8 + i) * 4 + 2 * half + 1] += b;
    }
  }
}

template <typename Config>
__device__ __forceinline__ void multiply_tiles(const FusedScatterParams& p, uint32_t shared,
                                               uint32_t tile, sm90::SharedBarriers<Config>& stages,
                                               TileBarriers& barriers, int group) {
  constexpr int kPieces = Piece<Config>::kOfGroup;
  const uint32_t filled = sm90::shared_address(&barriers.filled);
  const uint32_t emptied = sm90::shared_address(&barriers.emptied);
  const uint32_t loaded = sm90::shared_address(&barriers.loaded);
  const uint32_t taken = sm90::shared_address(&barriers.taken);
  const uint32_t mine_at = tile + group * kPieces * Config::kStoreBytes;
  const bool tells = threadIdx.x % 32 == 0;
  sm90::Multiplier<Config> mine(shared, stages, group);
  uint32_t fills = 0;
  uint32_t loads = 0;
  ScatterUnits<Config> units(p);
  Unit unit;
  while (units.next(unit)) {
    const bool own = unit.chunk == p.words.rank;
    const auto add_next = [&] {
      sm90::barrier_wait(loaded, loads & 1);
      ++loads;
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        add_from_shared<Config>(mine.sums[k / Config::kChunks], k % Config::kChunks,
                                mine_at + k * Config::kStoreBytes);
      }
      __syncwarp();
      if (tells) sm90::barrier_arrive(taken);
    };
    // The i-th is due after i of `others` parts of k, always at the same place: so are the sums.
    const int others = p.words.size - 1;
    const int between = own && p.adds_between ? others - 1 : 0;
    int added = 0;
    mine.multiply(
        unit, [&](int k) { return added < between && k * others >= (added + 1) * unit.depth; },
        [&] {
          add_next();
          ++added;
        });
    if (own) {
      for (; added < others; ++added) add_next();
      if (p.factor != 1.0F) {
#pragma unroll
        for (auto& row : mine.sums) {
#pragma unroll
          for (float& sum : row) sum *= p.factor;
        }
      }
    } else if (fills > 0) {
      sm90::barrier_wait(emptied, (fills - 1) & 1);
    }
    // With one rank nobody loads, so nobody has waited.
    if (own && p.words.size == 1 && fills > 0) sm90::barrier_wait(emptied, (fills - 1) & 1);
    ++fills;
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      sm90::round_to_shared<Config>(
          p.gemm, mine.sums[k / Config::kChunks], k % Config::kChunks,
          mine_at + k * Config::kStoreBytes,
          unit.column * Config::kColumns + mine.column() + k % Config::kChunks * 64, !own);
    }
    sm90::fence_shared_for_copies();
    __syncwarp();
    if (tells) sm90::barrier_arrive(filled);
  }
}

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fused_scatter_kernel(__grid_constant__ const FusedScatterParams p) {
  extern __shared__ char dynamic[];
  __shared__ sm90::SharedBarriers<Config> stages;
  __shared__ TileBarriers barriers;
  const uint32_t shared = (sm90::shared_address(dynamic) + 1023) & ~uint32_t{1023};
  const uint32_t tile = shared + Config::kStages * Config::kStageBytes;
  static_assert(Config::kCluster == 1 && Config::kStoreBuffers == Piece<Config>::kOfGroup);
  if (threadIdx.x == 0) {
    sm90::init_stages(stages);
    sm90::barrier_init(sm90::shared_address(&barriers.filled), 8);
    sm90::barrier_init(sm90::shared_address(&barriers.emptied), 1);
    sm90::barrier_init(sm90::shared_address(&barriers.loaded), 1);
    sm90::barrier_init(sm90::shared_address(&barriers.taken), 8);
    sm90::fence_barrier_init();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 0) {
    sm90::fewer_registers<40>();
    if (threadIdx.x == 0) {
      ScatterWork<Config> work{p};
      sm90::load_units<Config>(p.gemm, work, shared, stages);
    } else if (threadIdx.x == 32) {
      move_tiles<Config>(p, tile, barriers);
    }
  } else {
    sm90::more_registers<232>();
    multiply_tiles<Config>(p, shared, tile, stages, barriers, group - 1);
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
