// Exchanges by bulk copies.
#include <algorithm>

#include "torch_overlap/comm/backends/nccl/direct_bulk_device.h"

namespace torch_overlap::cuda {
namespace {

using namespace bulk;

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
      if (is_own && p.recv[source] == p.send[source]) return;  // in place
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
      return take<kAddStages<kShape>, kShape == Shape::reduce>(
          block, warp, stages, [&](uint32_t round) {
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
  extern __shared__ __align__(128) char stages[];
  __shared__ BulkShared shared;
  where_there_are_bulk_copies(
      [&](const auto& params) {
        init_shared(shared, params.size);
        wait_for_kernel_before();
        if (enter_block(params, shared.state)) {
          const Block block{params, shared, params.chunk * kVectorBytes};
          run_roles<kShape, T, Case>(block, shared_address(stages));
        }
        end_block(params, shared.state);
      },
      p);
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
