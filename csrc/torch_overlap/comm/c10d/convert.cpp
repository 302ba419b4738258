#include "torch_overlap/comm/c10d/convert.h"

#include <ATen/ops/as_strided.h>

#include <algorithm>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {

ReduceOp from_c10d(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return RedOpType::SUM;
    case c10d::ReduceOp::AVG:
      return RedOpType::AVG;
    case c10d::ReduceOp::PRODUCT:
      return RedOpType::PRODUCT;
    case c10d::ReduceOp::MIN:
      return RedOpType::MIN;
    case c10d::ReduceOp::MAX:
      return RedOpType::MAX;
    case c10d::ReduceOp::BAND:
      return RedOpType::BAND;
    case c10d::ReduceOp::BOR:
      return RedOpType::BOR;
    case c10d::ReduceOp::BXOR:
      return RedOpType::BXOR;
    case c10d::ReduceOp::PREMUL_SUM: {
      TORCH_OVERLAP_CHECK(op.supplement_, kType,
                          "ReduceOp: expected a factor with PREMUL_SUM, got none; make it with "
                          "torch.distributed._make_nccl_premul_sum(factor)");
      // The type of the supplement follows from the operation; c10d has no other.
      const auto& supplement = static_cast<const c10d::NCCLPreMulSumSupplement&>(*op.supplement_);
      return supplement.tensor_factor.defined() ? ReduceOp::premul_sum(supplement.tensor_factor)
                                                : ReduceOp::premul_sum(supplement.double_factor);
    }
    case c10d::ReduceOp::UNUSED:
      break;
  }
  fail(ErrorKind::kValue, "ReduceOp: expected one of torch.distributed.ReduceOp, got number ",
       static_cast<int>(op.op_));
}

at::Tensor memory_of(const at::Tensor& tensor) {
  const bool plain = tensor.defined() && tensor.layout() == c10::kStrided;
  if (!plain || tensor.is_contiguous() || !tensor.is_non_overlapping_and_dense()) return tensor;
  return at::as_strided(tensor.detach(), {tensor.numel()}, {1});
}

const at::Tensor& only(const std::vector<at::Tensor>& tensors, std::string_view op) {
  TORCH_OVERLAP_CHECK(tensors.size() == 1, kValue, op, ": expected one tensor for this rank, got ",
                      tensors.size(), "; a process drives one device");
  return tensors.front();
}

const std::vector<at::Tensor>& only(const std::vector<std::vector<at::Tensor>>& lists,
                                    std::string_view op) {
  TORCH_OVERLAP_CHECK(lists.size() == 1, kValue, op,
                      ": expected one list of tensors for this rank, got ", lists.size(),
                      "; a process drives one device");
  return lists.front();
}

std::vector<at::Tensor> root_list(const std::vector<std::vector<at::Tensor>>& lists, bool is_root,
                                  std::string_view op) {
  if (!is_root && lists.empty()) return {};
  return only(lists, op);
}

bool overlap(const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<const char*, const char*>> spans;
  spans.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || tensor.numel() == 0 || !tensor.has_storage()) continue;
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    spans.emplace_back(begin, begin + tensor.nbytes());
  }
  std::sort(spans.begin(), spans.end());
  return std::adjacent_find(spans.begin(), spans.end(), [](const auto& a, const auto& b) {
           return b.first < a.second;
         }) != spans.end();
}

}  // namespace torch_overlap
