#pragma once

#include <cstdint>

// Instructions of Hopper that CUDA C++ has no words for (PTX ISA 8.0 and later): barriers in shared
// memory that count bytes, bulk copies, proxies. For .cu files; used in code for sm_90 and newer.
namespace torch_overlap::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- Barriers in shared memory, by address

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// What barrier_init() wrote is seen by tensor copies and by the cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and the phase also waits for `bytes` of copies.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Returns when the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- Copies of whole 16 bytes, from and to places that are aligned as such

__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Also to the memory of a peer.
__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// --- Stores by copies

__device__ __forceinline__ void store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All but the last n groups of stores of this thread have read their shared memory.
template <int n>
__device__ __forceinline__ void stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(n) : "memory");
}

// They are written, as this thread sees it.
template <int n>
__device__ __forceinline__ void stores_done() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(n) : "memory");
}

// What this thread wrote to shared memory is seen by tensor copies issued after it, and what it
// read was there before they write.
__device__ __forceinline__ void fence_shared_for_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// What this thread has acquired of global memory is seen by its tensor copies.
__device__ __forceinline__ void fence_global_for_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// --- Threads of a block, and their shared memory

// Waits for `threads` threads of the block that meet under this number, 1 to 15, in whole warps;
// or is one of them, and goes on.
__device__ __forceinline__ void meet_threads(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void tell_threads(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// A word of one writer, which tells of what it has done; and what it has told.
__device__ __forceinline__ void note(uint32_t& word, uint32_t count) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(&word)), "r"(count)
               : "memory");
}
__device__ __forceinline__ uint32_t noted(const uint32_t& word) {
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
