#include "torch_overlap/comm/c10d/convert.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/below_dispatch_guard.h"
#include "torch_overlap/common/memory_overlap.h"

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
      // The operation determines the type of the supplement; c10d has no other.
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

namespace {

bool is_dense_contiguous(const at::Tensor& tensor) {
  return !tensor.defined() || tensor.layout() != c10::kStrided ||
         (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg());
}

// Returns a contiguous copy for an operation to write.
at::Tensor stage(const at::Tensor& tensor, std::vector<CopyBack>& copies, bool reads,
                 std::string_view op) {
  TORCH_OVERLAP_CHECK(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, kValue, op,
                      ": expected a tensor to write whose elements share no memory, got sizes ",
                      tensor.sizes(), " with strides ", tensor.strides(), "; call .clone() first");
  const at::Tensor staged = at::empty(tensor.sizes(), tensor.options());
  if (reads) staged.copy_(tensor);
  copies.push_back({staged, tensor});
  return staged;
}

}  // namespace

// Runs on any thread, and writes tensors that autograd or inference mode would guard.
void copy_back(const std::vector<CopyBack>& copies) {
  const BelowDispatchGuard plain;
  for (const auto& [from, to] : copies) to.copy_(from);
}

at::Tensor contiguous_input(const at::Tensor& tensor) {
  if (is_dense_contiguous(tensor)) return tensor;
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

std::vector<at::Tensor> contiguous_input(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) result.push_back(contiguous_input(tensor));
  return result;
}

at::Tensor contiguous_output(const at::Tensor& tensor, std::vector<CopyBack>& copies, bool reads,
                             std::string_view op) {
  const at::NoGradGuard no_grad;
  return is_dense_contiguous(tensor) ? tensor : stage(tensor, copies, reads, op);
}

std::vector<at::Tensor> contiguous_output(const std::vector<at::Tensor>& tensors,
                                          std::vector<CopyBack>& copies, bool reads,
                                          std::string_view op,
                                          const std::vector<at::Tensor>& inputs) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  std::map<uintptr_t, uintptr_t> taken;  // begin and end of disjoint ranges
  // Reserves a range, free or not: all later outputs that overlap it are staged, too.
  const auto take = [&](MemoryRange range) {
    if (range.empty()) return true;
    bool is_free = std::none_of(inputs.begin(), inputs.end(), [&range](const at::Tensor& input) {
      return memory_range(input).overlaps(range);
    });
    auto next = taken.upper_bound(range.begin);
    if (next != taken.begin() && std::prev(next)->second > range.begin) --next;
    for (; next != taken.end() && next->first < range.end; next = taken.erase(next)) {
      is_free = false;
      range = {std::min(range.begin, next->first), std::max(range.end, next->second)};
    }
    taken.emplace(range.begin, range.end);
    return is_free;
  };
  for (const auto& tensor : tensors) {
    const bool is_strided = tensor.defined() && tensor.layout() == c10::kStrided;
    result.push_back(!is_strided || take(memory_range(tensor))
                         ? contiguous_output(tensor, copies, reads, op)
                         : stage(tensor, copies, reads, op));
  }
  return result;
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

}  // namespace torch_overlap
