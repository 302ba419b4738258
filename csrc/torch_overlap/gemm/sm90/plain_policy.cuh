#pragma once

#include <cstdint>

#include "torch_overlap/gemm/sm90/params.h"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/tile_scheduler.cuh"

namespace torch_overlap::sm90 {

// The plain GEMM: no peers to wait for.
template <typename Config>
struct PlainPolicy {
  static constexpr AddendPosition kAddendPosition = AddendPosition::none;
  static constexpr bool kWaitsForPeers = false;
  const GemmParams& p;
  __device__ __forceinline__ TileScheduler units(const GemmParams&) {
    return TileScheduler::of<Config>(p);
  }
  __device__ __forceinline__ const CUtensorMap* lhs(const WorkTile&, int&) { return &p.lhs; }
  __device__ __forceinline__ const float* lhs_scale(const WorkTile&, int& rows) const {
    rows = p.m;
    return p.epilogue.lhs_scale;
  }
  __device__ __forceinline__ void store(const WorkTile&, uint32_t from, int column, int row) {
    tma_store_2d(&p.out, from, column, row);
  }
};

}  // namespace torch_overlap::sm90
