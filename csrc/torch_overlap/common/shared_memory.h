#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// The addresses from a tensor's first byte to behind its last; nothing of tensors that are
// undefined, empty or without memory.
struct MemoryRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  bool empty() const noexcept { return begin == end; }
  bool meets(const MemoryRange& other) const noexcept {
    return begin < other.end && other.begin < end;
  }
};
TORCH_OVERLAP_API MemoryRange memory_range(const at::Tensor& tensor);

// Whether two tensors of one device have bytes in common, whatever storages they are views of.
// Exact for matrices of contiguous rows and for contiguous tensors; others count as all that lies
// between their first byte and their last. Memory that is mapped twice is not seen.
TORCH_OVERLAP_API bool share_memory(const at::Tensor& a, const at::Tensor& b);

}  // namespace torch_overlap
