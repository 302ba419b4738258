#pragma once

#include <cstdint>

// Hopper instructions without a CUDA C++ equivalent (PTX ISA 8.0 and later): mbarriers that count
// bytes, bulk copies, proxies. For .cu files; used in code for sm_90 and newer.
namespace torch_overlap::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- mbarriers, by shared-memory address

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the writes of barrier_init() visible to tensor copies and to the cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase also wait for `bytes` of copies.
__device__ __forceinline__ void barrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

#define TORCH_OVERLAP_BARRIER_WAIT(ordering, barrier, parity) \
  asm volatile(                                               \
      "{\n"                                                   \
      ".reg .pred done;\n"                                    \
      "again:\n"                                              \
      "mbarrier.try_wait.parity" ordering                     \
      ".shared::cta.b64 done, [%0], %1;\n"                    \
      "@done bra over;\n"                                     \
      "bra again;\n"                                          \
      "over:\n"                                               \
      "}" ::"r"(barrier),                                     \
      "r"(parity)                                             \
      : "memory")

// Returns when the phase of this parity has completed.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  TORCH_OVERLAP_BARRIER_WAIT("", barrier, parity);
}

// barrier_wait() for a phase that other blocks of the cluster complete.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  TORCH_OVERLAP_BARRIER_WAIT(".acquire.cluster", barrier, parity);
}

#undef TORCH_OVERLAP_BARRIER_WAIT

// --- Copies of multiples of 16 bytes, between addresses of that alignment

__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// The destination may be in the memory of a peer.
__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// --- Groups of bulk stores

__device__ __forceinline__ void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last n groups of stores of this thread have read their shared memory.
template <int n>
__device__ __forceinline__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(n) : "memory");
}

// Waits until they are written, as this thread sees it.
template <int n>
__device__ __forceinline__ void bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(n) : "memory");
}

// Makes this thread's earlier writes to shared memory visible to tensor copies issued after it, and
// orders its earlier reads before the writes of these copies.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Makes the global memory that this thread has acquired visible to its tensor copies.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// --- Threads of a block, and their shared memory

// Synchronizes `threads` threads of the block, in whole warps, at the named barrier `number`, 1 to
// 15. named_barrier_arrive() arrives without waiting.
__device__ __forceinline__ void named_barrier_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Stores, or loads, a word with one writer, which publishes its progress.
__device__ __forceinline__ void store_release_shared(uint32_t& word, uint32_t count) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&word)), "r"(count)
               : "memory");
}
__device__ __forceinline__ uint32_t load_acquire_shared(const uint32_t& word) {
  uint32_t count;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
               : "=r"(count)
               : "r"(shared_address(&word))
               : "memory");
  return count;
}

__device__ __forceinline__ uint4 load_vector(uint32_t address) {
  uint4 out;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "r"(address)
               : "memory");
  return out;
}

__device__ __forceinline__ void store_vector(uint32_t address, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

}  // namespace torch_overlap::sm90
