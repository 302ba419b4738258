#include "torch_overlap/common/memory_overlap.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace torch_overlap {
namespace {

// `count` rows of `width_bytes` bytes at a stride of `stride_bytes`.
struct Rows {
  int64_t begin;
  int64_t width_bytes;
  int64_t count;
  int64_t stride_bytes;
};

Rows rows_of(const at::Tensor& tensor) {
  const auto range = memory_range(tensor);
  const auto begin = static_cast<int64_t>(range.begin);
  const auto length = static_cast<int64_t>(range.end - range.begin);
  if (tensor.dim() == 2 && tensor.size(0) > 1 && (tensor.size(1) == 1 || tensor.stride(1) == 1)) {
    const int64_t item = static_cast<int64_t>(tensor.element_size());
    const Rows rows{begin, tensor.size(1) * item, tensor.size(0), tensor.stride(0) * item};
    if (rows.stride_bytes > rows.width_bytes) return rows;
  }
  return {begin, length, 1, length};
}

// Returns true if rows of the same stride overlap: for row i of `a` and row j of `b` this depends
// only on j - i.
bool rows_overlap(const Rows& a, const Rows& b, int64_t stride_bytes) {
  const int64_t offset = b.begin - a.begin;
  // Smallest j - i for which row j of `b` does not end before row i of `a` begins.
  const int64_t before = -b.width_bytes - offset;
  const int64_t floor = before / stride_bytes - (before % stride_bytes < 0 ? 1 : 0);
  const int64_t shift = std::max(floor + 1, 1 - a.count);
  return shift < b.count && offset + shift * stride_bytes < a.width_bytes;
}

bool rows_overlap(const Rows& a, const Rows& b) {
  if (a.count == 1) return rows_overlap(a, b, b.stride_bytes);
  if (b.count == 1 || a.stride_bytes == b.stride_bytes) return rows_overlap(a, b, a.stride_bytes);
  const auto& [fewer, more] = a.count < b.count ? std::pair(a, b) : std::pair(b, a);
  Rows row = fewer;
  row.count = 1;
  for (int64_t i = 0; i < fewer.count; ++i, row.begin += fewer.stride_bytes) {
    if (rows_overlap(row, more, more.stride_bytes)) return true;
  }
  return false;
}

}  // namespace

MemoryRange memory_range(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0 || !tensor.has_storage()) return {};
  // data_ptr() throws for traced tensors.
  const void* storage =
      tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  if (storage == nullptr) return {};
  const auto item = static_cast<uintptr_t>(tensor.element_size());
  const auto begin =
      reinterpret_cast<uintptr_t>(storage) + static_cast<uintptr_t>(tensor.storage_offset()) * item;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return {begin, begin + static_cast<uintptr_t>(last + 1) * item};
}

bool memory_overlaps(const at::Tensor& a, const at::Tensor& b) {
  const auto one = memory_range(a);
  const auto other = memory_range(b);
  return one.overlaps(other) && rows_overlap(rows_of(a), rows_of(b));
}

std::optional<at::Tensor> joined_memory(const std::vector<at::Tensor>& parts) {
  if (parts.empty() || !parts[0].defined() || parts[0].dim() == 0) return std::nullopt;
  const at::Tensor& first = parts[0];
  const MemoryRange begin = memory_range(first);
  auto sizes = first.sizes().vec();
  sizes[0] = 0;
  uintptr_t end = begin.begin;
  for (const at::Tensor& part : parts) {
    const MemoryRange range = memory_range(part);
    if (range.empty() || range.begin != end || !part.is_contiguous() ||
        part.scalar_type() != first.scalar_type() || part.device() != first.device() ||
        part.sizes().slice(1) != first.sizes().slice(1)) {
      return std::nullopt;
    }
    end = range.end;
    sizes[0] += part.size(0);
  }
  auto whole = at::for_blob(reinterpret_cast<void*>(begin.begin),
                            sizes)  // NOLINT(performance-no-int-to-ptr)
                   .options(first.options())
                   .target_device(first.device())
                   .deleter([parts](void*) {})
                   .make_tensor();
  if (!whole.is_inference() && !first.is_inference()) {
    using namespace torch::autograd;
    impl::set_version_counter(whole, impl::version_counter(first));
  }
  return whole;
}

}  // namespace torch_overlap
