#pragma once

#include <ATen/core/Tensor.h>
#include <cuda.h>

#include <cstdint>

#include "torch_overlap/base/export.h"

namespace torch_overlap::sm90 {

// What addresses and sizes of tensor copies are multiples of, in bytes.
inline constexpr int64_t kCopyAlignment = 16;

// A matrix of 8- or 16-bit floats, or kInt, as tensor copies see it: boxes of `box_bytes` and
// `box_rows` rows lie in shared memory under the swizzle of as many bytes, 128 or 64, or as they
// are if that is more; what is outside the matrix reads as 0. It is not written, but for the end of
// the 16 bytes in which a row ends: see is_storable(). Rows lie `stride` elements apart. Throws
// kUnsupported where the driver has no such maps. A thread keeps what it asked for, the last one of
// each hash, and finds it again.
TORCH_OVERLAP_API CUtensorMap matrix_map(const void* data, at::ScalarType dtype, int64_t rows,
                                         int64_t columns, int64_t stride, int box_rows,
                                         int box_bytes = 128);
CUtensorMap matrix_map(const at::Tensor& matrix, int box_rows, int box_bytes = 128);

// Whether it can be one: contiguous rows that begin at multiples of 16 bytes.
bool is_mappable(const void* data, at::ScalarType dtype, int64_t stride);
bool is_mappable(const at::Tensor& matrix);

// Whether tensor copies may write it: rows end at multiples of 16 bytes too, less is never stored.
bool is_storable(const void* data, at::ScalarType dtype, int64_t columns, int64_t stride);
bool is_storable(const at::Tensor& matrix);

}  // namespace torch_overlap::sm90
