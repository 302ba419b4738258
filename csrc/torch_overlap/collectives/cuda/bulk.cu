// Collectives by bulk copies.
#include <algorithm>

#include "torch_overlap/collectives/cuda/bulk_device.h"

namespace torch_overlap::cuda {
namespace {

using namespace bulk;

// --- Kernels -------------------------------------------------------------------------------------

__host__ __device__ constexpr int threads_of(BulkAlgo shape, int size) {
  const int forwarders = shape == BulkAlgo::copy       ? size
                         : shape == BulkAlgo::two_shot ? size - 1
                                                       : 0;
  const int takers = has_reducers(shape) ? size : 0;
  return (1 + size - 1 + forwarders + takers) * kWarp +
         (has_reducers(shape) ? kNumReduceThreads : 0);
}

template <BulkAlgo kAlgo>
__host__ __device__ constexpr uint32_t stages_of(int size) {
  int count = (size - 1) * kSendStages<kAlgo>;
  if (kAlgo == BulkAlgo::copy) count += size * kForwardStages<kAlgo>;
  if (kAlgo == BulkAlgo::two_shot) count += (size - 1) * kForwardStages<kAlgo>;
  if (has_reducers(kAlgo)) count += size * kReduceStages<kAlgo>;
  return static_cast<uint32_t>(count);
}

// Runs the roles of a block, by warp: notifier, senders, forwarders, loaders, reducers.
template <BulkAlgo kAlgo, typename T, typename Case>
__device__ __forceinline__ void run_roles(const Block& block, uint32_t stages) {
  const CollectiveParams& p = block.p;
  BulkShared& shared = block.shared;
  const uint32_t bytes = block.stage_bytes;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool is_first = lane == 0;
  int warp = static_cast<int>(threadIdx.x) / kWarp;
  if (warp == 0) return signal_peers<kAlgo == BulkAlgo::two_shot ? 2 : 1>(block, lane);
  --warp;

  const auto slice = [&](int rank) {
    return kAlgo == BulkAlgo::two_shot ? slice_of(p, rank) : Slice{0, p.send_bytes[rank]};
  };
  // Returns the piece that goes to a rank, or this rank's own piece.
  const auto piece_for = [&](int rank, uint32_t round) {
    const Slice part = slice(rank);
    const uint64_t at = block.place(round);
    return Piece{p.send[rank] + part.begin + at, block.length(at, part.bytes)};
  };
  constexpr int kSend = kSendStages<kAlgo>;
  const int peers = p.size - 1;
  if (warp < peers) {
    const int peer = rank_after<Case>(p, warp + 1);
    if (!is_first) return;
    return send<kSend>(block, peer, stages + warp * kSend * bytes,
                       [&](uint32_t round) { return piece_for(peer, round); });
  }
  warp -= peers;
  stages += peers * kSend * bytes;

  if constexpr (has_forwarders(kAlgo)) {
    constexpr int kForward = kForwardStages<kAlgo>;
    constexpr bool kOwnToo = kAlgo == BulkAlgo::copy;
    const int forwarders = kOwnToo ? p.size : peers;
    if (warp < forwarders) {
      const int source = rank_before<Case>(p, kOwnToo ? warp : warp + 1);
      if (!is_first) return;
      const bool is_own = source == p.rank;
      if (is_own && p.recv[source] == p.send[source]) return;  // in place
      const uint32_t own_rounds = p.recv_bytes[source] > block.place(0) ? block.rounds() : 0;
      const auto place = [&](uint32_t round) {
        const uint64_t at = block.place(round);
        if constexpr (kAlgo == BulkAlgo::copy) {
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

  if constexpr (has_reducers(kAlgo)) {
    if (warp < p.size) {
      if (!is_first) return;
      return take<kReduceStages<kAlgo>, kAlgo == BulkAlgo::reduce>(
          block, warp, stages, [&](uint32_t round) {
            // In place, the sum overwrites data that the senders read: they must have read it.
            if (kAlgo == BulkAlgo::reduce && p.has_single_source && warp == p.rank) {
              for (int k = 1; k < p.size; ++k) {
                block.await(shared.loaded[rank_after<Case>(p, k)], round + 1);
              }
            }
            return piece_for(p.rank, round);
          });
    }
    warp -= p.size;
    const int thread = warp * kWarp + lane;
    add<T, Case, kAlgo>(block, thread, stages, [&](uint32_t round) {
      Piece out = piece_for(p.rank, round);
      out.from = p.recv[0] + slice(p.rank).begin + block.place(round);
      return out;
    });
  }
}

template <BulkAlgo kAlgo, typename T, typename Case>
__global__ void __launch_bounds__(threads_of(kAlgo, Case::kMaxRanks), 1)
    bulk_kernel(const __grid_constant__ CollectiveParams p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ BulkShared shared;
  run_on_sm90(
      [&](const auto& params) {
        init_shared(shared, params.size);
        wait_for_kernel_before();
        if (enter_block(params, shared.state)) {
          const Block block{params, shared, params.chunk * kVectorBytes};
          run_roles<kAlgo, T, Case>(block, shared_address(stages));
        }
        end_block(params, shared.state);
      },
      p);
}

template <BulkAlgo kAlgo, typename T, typename Case>
cudaError_t launch_bulk(const CollectiveParams& params, LaunchConfig launch) {
  const auto kernel = bulk_kernel<kAlgo, T, Case>;
  launch.threads = threads_of(kAlgo, params.size);
  launch.shared_bytes = stages_of<kAlgo>(params.size) * params.chunk * kVectorBytes;
  return launch_kernel(kernel, launch, params);
}

template <BulkAlgo kAlgo, typename T, typename Case>
cudaError_t load() {
  const auto kernel = bulk_kernel<kAlgo, T, Case>;
  const cudaError_t status = load_kernel(kernel);
  if (status != cudaSuccess) return status;
  constexpr int kSize = Case::kMaxRanks;
  size_t max_bytes = 0;
  for (int size = 2; size <= kSize; ++size) {
    max_bytes = std::max(max_bytes, size_t{stages_of<kAlgo>(size)} * G::bulk_bytes(size));
  }
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(max_bytes));
}

}  // namespace

cudaError_t launch_bulk_copy(const CollectiveParams& params, const LaunchConfig& launch) {
  return launch_bulk<BulkAlgo::copy, float, GenericCase>(params, launch);
}

cudaError_t launch_bulk_reduce(ReductionType type, const CollectiveParams& params,
                               const LaunchConfig& launch) {
  return for_reduction(type, params, kVectorBytes, [&](auto zero, auto which) {
    return launch_bulk<BulkAlgo::reduce, decltype(zero), decltype(which)>(params, launch);
  });
}

cudaError_t launch_bulk_two_shot(ReductionType type, const CollectiveParams& params,
                                 const LaunchConfig& launch) {
  return for_reduction(type, params, kVectorBytes, [&](auto zero, auto which) {
    using Case = decltype(which);
    if constexpr (Case::kMaxRanks > 2) {
      return launch_bulk<BulkAlgo::two_shot, decltype(zero), Case>(params, launch);
    } else {
      return cudaErrorInvalidValue;
    }
  });
}

cudaError_t load_bulk_kernels() {
  const cudaError_t status = load<BulkAlgo::copy, float, GenericCase>();
  if (status != cudaSuccess) return status;
  return load_reductions([](auto zero, auto which) {
    using T = decltype(zero);
    using Case = decltype(which);
    const cudaError_t loaded = load<BulkAlgo::reduce, T, Case>();
    if constexpr (Case::kMaxRanks > 2) {
      if (loaded == cudaSuccess) return load<BulkAlgo::two_shot, T, Case>();
    }
    return loaded;
  });
}

}  // namespace torch_overlap::cuda
