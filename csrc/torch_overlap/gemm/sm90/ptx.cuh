#pragma once

#include <cuda.h>

#include <cstdint>

#include "torch_overlap/common/cuda/hopper_device.h"

// PTX instructions of sm_90a: clusters, TMA, registers and matrices of warps. For .cu files
// compiled for sm_90a.
namespace torch_overlap::sm90 {

// --- Blocks of a cluster

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Must be called by all threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Stores to the same address in the shared memory of block `rank`.
__device__ __forceinline__ void st_shared_cluster(uint32_t to, uint32_t rank, float4 value) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5};\n"
      "}" ::"r"(to),
      "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}

// Arrives at the barrier at the same address in the shared memory of block `rank`.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// --- TMA

__device__ __forceinline__ void tma_load_2d(uint32_t to, const CUtensorMap* map, uint32_t barrier,
                                            int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}

// Copies to the same address in every block whose bit is set in `blocks`; the barrier there counts
// the bytes.
__device__ __forceinline__ void tma_load_2d_multicast(uint32_t to, const CUtensorMap* map,
                                                      uint32_t barrier, int x, int y,
                                                      uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
      "multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
      : "memory");
}

// Stores whole 16-byte units, even if a row ends within one.
__device__ __forceinline__ void tma_store_2d(const CUtensorMap* map, uint32_t from, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y)
      : "memory");
}

// --- Registers of a warpgroup

template <int n>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}

template <int n>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}

// --- Shared memory

// Loads four 8 x 8 matrices of 16 bits: lane l has two neighbours of row l / 4 of each matrix in
// one register. `address` is that of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t (&out)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t* in) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3])
               : "memory");
}

// The same with each matrix transposed.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t* in) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(in[0]), "r"(in[1]), "r"(in[2]), "r"(in[3])
      : "memory");
}

}  // namespace torch_overlap::sm90
