#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>

#include "torch_overlap/base/errors.h"

// Views created without torch's dispatcher, for speed: an eager call creates dozens. Autograd does
// not record them. They share the version counter of the tensor that they are views of, which must
// have a storage.
namespace torch_overlap {

// Returns a view of the same memory. The caller sets its sizes.
inline at::Tensor alias_of(const at::Tensor& tensor, at::ScalarType dtype) {
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(),
      c10::scalarTypeToTypeMeta(dtype));
  alias.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
  return alias;
}

// Returns rows [begin, begin + length); the tensor itself if these are all.
inline at::Tensor row_view(const at::Tensor& tensor, int64_t begin, int64_t length) {
  TORCH_OVERLAP_CHECK(begin >= 0 && length >= 0 && begin + length <= tensor.size(0), kValue,
                      "expected rows within [0, ", tensor.size(0), "), got [", begin, ", ",
                      begin + length, ")");
  if (length == tensor.size(0)) return tensor;
  c10::SmallVector<int64_t, 5> sizes(tensor.sizes());
  sizes[0] = length;
  auto rows = alias_of(tensor, tensor.scalar_type());
  rows.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, tensor.strides(), tensor.storage_offset() + begin * tensor.stride(0));
  return rows;
}

// Returns contiguous elements of `dtype` from byte `at` on of a tensor of bytes; `at` is a multiple
// of the element size.
inline at::Tensor typed_view(const at::Tensor& bytes, int64_t at, c10::IntArrayRef sizes,
                             at::ScalarType dtype) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  int64_t length = element;
  for (const int64_t size : sizes) length *= size;
  const int64_t begin = bytes.storage_offset() + at;
  TORCH_OVERLAP_CHECK(at >= 0 && at + length <= bytes.numel() && begin % element == 0, kValue,
                      "expected whole elements of ", dtype, " within ", bytes.numel(),
                      " bytes, got ", length, " bytes from ", at);
  auto view = alias_of(bytes, dtype);
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(begin / element);
  impl->set_sizes_contiguous(sizes);
  return view;
}

}  // namespace torch_overlap
