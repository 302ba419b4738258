#pragma once

#include <cstdint>

#include "torch_overlap/gemm/sm90/params.h"
#include "torch_overlap/gemm/sm90/ptx.cuh"
#include "torch_overlap/gemm/sm90/tiles.cuh"

namespace torch_overlap::sm90 {

// The plain product: nobody to wait for.
template <typename Config>
struct PlainWork {
  static constexpr Adds kAdds = Adds::nothing;
  static constexpr bool kAwaits = false;
  const GemmParams& p;
  __device__ __forceinline__ UnitList units(const GemmParams&) { return UnitList::of<Config>(p); }
  __device__ __forceinline__ const CUtensorMap* lhs(const Unit&, int&) { return &p.lhs; }
  __device__ __forceinline__ const float* lhs_scale(const Unit&, int& rows) const {
    rows = p.m;
    return p.epilogue.lhs_scale;
  }
  __device__ __forceinline__ void store(const Unit&, uint32_t from, int column, int row) {
    tensor_store(&p.out, from, column, row);
  }
};

}  // namespace torch_overlap::sm90
