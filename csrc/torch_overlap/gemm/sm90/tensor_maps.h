#pragma once

#include <ATen/core/Tensor.h>
#include <cuda.h>

#include <cstdint>

#include "torch_overlap/base/export.h"

namespace torch_overlap::sm90 {

// Alignment in bytes of addresses and sizes that TMA requires.
inline constexpr int64_t kTmaAlignmentBytes = 16;

// Returns the tensor map of a matrix of 8- or 16-bit floats, or kInt. Boxes of `box_rows` rows of
// `box_bytes` are stored in shared memory under the swizzle of that many bytes, 128 or 64, or
// unswizzled if box_bytes is larger. Elements outside the matrix read as 0. They are not written,
// except the rest of the 16 bytes in which a row ends: see supports_tma_store(). Rows are `stride`
// elements apart. Reads fetch `l2_bytes`, 128 or 256, into L2: 128 is faster for a matrix that is
// read once. Throws kUnsupported if the driver has no tensor maps. Each thread caches its maps, one
// per hash.
TORCH_OVERLAP_API CUtensorMap make_tensor_map(const void* data, at::ScalarType dtype, int64_t rows,
                                              int64_t columns, int64_t stride, int box_rows,
                                              int box_bytes = 128, int l2_bytes = 256);
CUtensorMap make_tensor_map(const at::Tensor& matrix, int box_rows, int box_bytes = 128);

// True if TMA can read the matrix: contiguous rows that begin at multiples of 16 bytes.
bool supports_tma_load(const void* data, at::ScalarType dtype, int64_t stride);
bool supports_tma_load(const at::Tensor& matrix);

// True if TMA can write it: rows also end at multiples of 16 bytes, since TMA never stores less.
bool supports_tma_store(const void* data, at::ScalarType dtype, int64_t columns, int64_t stride);
bool supports_tma_store(const at::Tensor& matrix);

}  // namespace torch_overlap::sm90
