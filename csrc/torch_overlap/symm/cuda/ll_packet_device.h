#pragma once

#include <cstdint>

// Packets of 16 bytes that are stored and loaded as one, also between GPUs. With the number of the
// round in one of its words, a packet itself shows that it has arrived. For .cu files.
namespace torch_overlap::cuda {

__device__ __forceinline__ void store_ll(void* to, uint4 line) {
  const uint64_t low = line.x | static_cast<uint64_t>(line.y) << 32;
  const uint64_t high = line.z | static_cast<uint64_t>(line.w) << 32;
  asm volatile(
      "{\n"
      ".reg .b128 line;\n"
      "mov.b128 line, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], line;\n"
      "}" ::"l"(to),
      "l"(low), "l"(high)
      : "memory");
}

__device__ __forceinline__ uint4 load_ll(const void* from) {
  uint64_t low;
  uint64_t high;
  asm volatile(
      "{\n"
      ".reg .b128 line;\n"
      "ld.relaxed.sys.global.b128 line, [%2];\n"
      "mov.b128 {%0, %1}, line;\n"
      "}"
      : "=l"(low), "=l"(high)
      : "l"(from)
      : "memory");
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
          static_cast<uint32_t>(high >> 32)};
}

}  // namespace torch_overlap::cuda
