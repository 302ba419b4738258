#pragma once

#include <cstdint>

// Matrices as kernels of rows take them. For .cu files too.
namespace torch_overlap::cuda {

enum class RowType { kFloat, kHalf, kBFloat16 };

inline constexpr int64_t kVectorBytes = 16;  // of a thread's loads and stores

// A matrix whose rows are dense.
struct Rows {
  const void* data = nullptr;
  int64_t stride = 0;  // elements from one row to the next

  // True if every row begins at a multiple of kVectorBytes.
  bool is_aligned(int64_t element_bytes) const {
    return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0 &&
           stride * element_bytes % kVectorBytes == 0;
  }
};

}  // namespace torch_overlap::cuda
