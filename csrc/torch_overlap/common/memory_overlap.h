#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Addresses from a tensor's first byte to one past its last. Empty for tensors that are undefined,
// empty or without memory.
struct MemoryRange {
  uintptr_t begin = 0;
  uintptr_t end = 0;

  bool empty() const noexcept { return begin == end; }
  bool overlaps(const MemoryRange& other) const noexcept {
    return begin < other.end && other.begin < end;
  }
};
TORCH_OVERLAP_API MemoryRange memory_range(const at::Tensor& tensor);

// Returns true if two tensors of one device have bytes in common, regardless of the storages that
// they are views of. Exact for matrices of contiguous rows and for contiguous tensors; other
// tensors count as the whole range from their first byte to their last. Memory that is mapped twice
// is not detected.
TORCH_OVERLAP_API bool memory_overlaps(const at::Tensor& a, const at::Tensor& b);

// Returns the memory of parts [rows, ...] that lie one after the other as one tensor [all rows,
// ...] of a storage of its own, which keeps those of the parts; its version is the first part's.
// Nothing if they lie elsewhere, or have no memory.
TORCH_OVERLAP_API std::optional<at::Tensor> joined_memory(const std::vector<at::Tensor>& parts);

}  // namespace torch_overlap
