#include "torch_overlap/common/shared_memory.h"

#include <algorithm>

namespace torch_overlap {
namespace {

// `count` rows of `width` bytes, each `distance` behind the one before.
struct Rows {
  int64_t begin;
  int64_t width;
  int64_t count;
  int64_t distance;
};

Rows rows_of(const at::Tensor& tensor) {
  const auto range = memory_range(tensor);
  const auto begin = static_cast<int64_t>(range.begin);
  const auto length = static_cast<int64_t>(range.end - range.begin);
  if (tensor.dim() == 2 && tensor.size(0) > 1 && (tensor.size(1) == 1 || tensor.stride(1) == 1)) {
    const int64_t item = static_cast<int64_t>(tensor.element_size());
    const Rows rows{begin, tensor.size(1) * item, tensor.size(0), tensor.stride(0) * item};
    if (rows.distance > rows.width) return rows;
  }
  return {begin, length, 1, length};
}

// Of rows as far apart: whether row i of `a` meets row j of `b` depends on j - i alone.
bool meet(const Rows& a, const Rows& b, int64_t distance) {
  const int64_t offset = b.begin - a.begin;
  // The least j - i for which that row of b does not end before that row of a begins.
  const int64_t before = -b.width - offset;
  const int64_t floor = before / distance - (before % distance < 0 ? 1 : 0);
  const int64_t shift = std::max(floor + 1, 1 - a.count);
  return shift < b.count && offset + shift * distance < a.width;
}

bool meet(const Rows& a, const Rows& b) {
  if (a.count == 1) return meet(a, b, b.distance);
  if (b.count == 1 || a.distance == b.distance) return meet(a, b, a.distance);
  const auto& [fewer, more] = a.count < b.count ? std::pair(a, b) : std::pair(b, a);
  Rows row = fewer;
  row.count = 1;
  for (int64_t i = 0; i < fewer.count; ++i, row.begin += fewer.distance) {
    if (meet(row, more, more.distance)) return true;
  }
  return false;
}

}  // namespace

MemoryRange memory_range(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0 || !tensor.has_storage()) return {};
  // data_ptr() throws for what is traced.
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

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  const auto one = memory_range(a);
  const auto other = memory_range(b);
  return one.meets(other) && meet(rows_of(a), rows_of(b));
}

}  // namespace torch_overlap
