#include "torch_overlap/comm/validate.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/common/memory_overlap.h"

namespace torch_overlap {
namespace {

// True if every element is in memory. False under FakeTensorMode, in subclasses that wrap other
// tensors, within vmap or grad, or after a resize of the storage.
bool has_memory(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return false;
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (storage->_mutable_data_ptr_no_checks().get() == nullptr) return false;
  const int64_t elements = tensor.storage_offset() + tensor.numel();
  return storage->nbytes() >= static_cast<size_t>(elements) * tensor.element_size();
}

}  // namespace

void Checker::tensor(const at::Tensor& tensor, const ArgumentName& what) const {
  TORCH_OVERLAP_CHECK(tensor.defined(), kType, op, ": expected a tensor as ", what, ", got none");
  TORCH_OVERLAP_CHECK(tensor.layout() == at::kStrided, kType, op, ": expected a dense tensor as ",
                      what, ", got layout ", tensor.layout());
  TORCH_OVERLAP_CHECK(tensor.device() == device, kType, op, ": expected ", what, " on ", device,
                      ", got ", tensor.device());
  TORCH_OVERLAP_CHECK(tensor.is_contiguous(), kValue, op, ": expected a contiguous tensor as ",
                      what, ", got sizes ", tensor.sizes(), " with strides ", tensor.strides(),
                      "; call .contiguous() first");
  TORCH_OVERLAP_CHECK(!tensor.is_conj() && !tensor.is_neg(), kValue, op,
                      ": expected plain memory as ", what,
                      ", got a lazy conjugate or negative; call .resolve_conj().resolve_neg()");
  TORCH_OVERLAP_CHECK(!moves_data || tensor.numel() == 0 || has_memory(tensor), kType, op,
                      ": expected a tensor with memory of its own as ", what,
                      ", got one without (a fake, zero, wrapped or batched tensor, or of a resized "
                      "storage); torch.ops.torch_overlap has operators that trace and map");
}

void Checker::tensor_like(const at::Tensor& tensor, const at::Tensor& like,
                          const ArgumentName& what) const {
  this->tensor(tensor, what);
  TORCH_OVERLAP_CHECK(tensor.scalar_type() == like.scalar_type(), kType, op, ": expected ", what,
                      " of dtype ", like.scalar_type(), ", got ", tensor.scalar_type());
}

void Checker::list(const std::vector<at::Tensor>& tensors, const at::Tensor& like,
                   std::string_view what) const {
  TORCH_OVERLAP_CHECK(static_cast<int>(tensors.size()) == size, kValue, op, ": expected ", size,
                      " tensors as ", what, ", one for each rank, got ", tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    tensor_like(tensors[i], like, {what, static_cast<int64_t>(i)});
  }
}

void Checker::rank_in_range(int rank, std::string_view what) const {
  TORCH_OVERLAP_CHECK(rank >= 0 && rank < size, kValue, op, ": expected ", what, " in [0, ", size,
                      "), got ", rank);
}

void Checker::no_overlap(const at::Tensor& read, const at::Tensor& written, bool allow_same,
                         std::string_view what) const {
  const MemoryRange a = memory_range(read);
  const MemoryRange b = memory_range(written);
  if (!a.overlaps(b) || (allow_same && a.begin == b.begin)) return;
  fail(ErrorKind::kValue, op, ": expected ", what,
       allow_same ? " that shares no memory with the input, but for this rank's own part"
                  : " that shares no memory with the input",
       ", got overlapping ones");
}

void Checker::written_no_overlap(const std::vector<Use>& uses,
                                 const std::pair<std::string_view, std::string_view>& which,
                                 std::string_view others) const {
  std::vector<std::pair<MemoryRange, bool>> ranges;
  for (const Use& use : uses) {
    const MemoryRange range = memory_range(use.tensor);
    if (!range.empty()) ranges.emplace_back(range, use.is_written);
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
  uintptr_t end = 0;
  uintptr_t written_end = 0;
  for (const auto& [range, is_written] : ranges) {
    TORCH_OVERLAP_CHECK(range.begin >= (is_written ? end : written_end), kValue, op,
                        ": expected tensors ", which.first, which.second,
                        " that share no memory with ", others, ", got overlapping ones");
    end = std::max(end, range.end);
    if (is_written) written_end = std::max(written_end, range.end);
  }
}

void Checker::recv_no_overlap(const std::vector<P2POp>& ops) const {
  if (!moves_data) return;
  std::vector<Use> uses;
  for (const P2POp& one : ops) uses.push_back({one.tensor, one.type == P2POp::Type::RECV});
  written_no_overlap(uses, {"to receive into", ""}, "others of the batch");
}

void Checker::outputs_no_overlap(const std::vector<at::Tensor>& outputs,
                                 std::string_view what) const {
  if (!moves_data) return;
  std::vector<Use> uses;
  for (const at::Tensor& one : outputs) uses.push_back({one, true});
  written_no_overlap(uses, {"of ", what}, "each other");
}

void Checker::numel(const at::Tensor& tensor, int64_t expected, const ArgumentName& what) const {
  TORCH_OVERLAP_CHECK(tensor.numel() == expected, kValue, op, ": expected ", what, " of ", expected,
                      " elements, got ", tensor.numel(), " (sizes ", tensor.sizes(), ")");
}

void Checker::numel_of_all(const at::Tensor& tensor, const at::Tensor& part, std::string_view what,
                           std::string_view part_name) const {
  const int64_t expected = size * part.numel();
  TORCH_OVERLAP_CHECK(tensor.numel() == expected, kValue, op, ": expected ", what, " of ", expected,
                      " elements, which is ", size, " ranks x ", part.numel(), " of ", part_name,
                      " (sizes ", part.sizes(), "), got ", tensor.numel(), " (sizes ",
                      tensor.sizes(), ")");
}

namespace {

// True for the floating-point dtypes that can be reduced. Others are only moved.
bool is_reduced_float(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
      return true;
    default:
      return false;
  }
}

}  // namespace

void check_reduction(std::string_view op, at::ScalarType dtype, const ReduceOp& reduce_op) {
  const auto type = reduce_op.type();
  const auto refuse = [&](const char* which) {
    fail(ErrorKind::kType, op, ": expected ", which, " for ", reduce_op.repr(), ", got ", dtype);
  };
  const bool boolean = dtype == at::kBool;
  const bool floating = is_reduced_float(dtype);
  const bool linear =
      type == RedOpType::SUM || type == RedOpType::AVG || type == RedOpType::PREMUL_SUM;
  if (c10::isComplexType(dtype)) {
    if (!linear) refuse("a real dtype");
  } else if (!boolean && !floating && !c10::isIntegralType(dtype, /*includeBool=*/false)) {
    refuse("a number dtype");
  }
  if (reduce_op.is_bitwise() && floating) refuse("an integer or bool dtype");
  if (boolean && (type == RedOpType::AVG || type == RedOpType::PREMUL_SUM)) {
    refuse("a number dtype");
  }
  if (type == RedOpType::PREMUL_SUM && !floating && !c10::isComplexType(dtype)) {
    refuse("a floating dtype");
  }
}

void Checker::reduction(const at::Tensor& tensor, const ReduceOp& reduce_op) const {
  const auto dtype = tensor.scalar_type();
  check_reduction(op, dtype, reduce_op);
  if (const auto* factor = std::get_if<at::Tensor>(&reduce_op.factor())) {
    this->tensor(*factor, "the PREMUL_SUM factor");
    const auto expected = c10::toRealValueType(dtype);
    TORCH_OVERLAP_CHECK(factor->scalar_type() == expected, kType, op,
                        ": expected a PREMUL_SUM factor of dtype ", expected, ", got ",
                        factor->scalar_type());
    TORCH_OVERLAP_CHECK(!memory_overlaps(*factor, tensor), kValue, op,
                        ": expected a PREMUL_SUM factor that shares no memory with what is "
                        "written, got overlapping ones; clone it");
  }
}

RankTensors rank_tensors_of(const std::vector<at::Tensor>& parts) {
  RankTensors blocks;
  blocks.parts = parts;
  if (parts.empty()) return blocks;
  const auto& first = parts.front();
  int64_t offset = first.storage_offset();
  bool uniform = true;
  for (const auto& part : parts) {
    if (!part.storage().is_alias_of(first.storage()) || part.storage_offset() != offset ||
        part.scalar_type() != first.scalar_type()) {
      return blocks;
    }
    uniform = uniform && part.numel() == first.numel();
    offset += part.numel();
  }
  const at::NoGradGuard no_grad;
  blocks.flat = first.as_strided({offset - first.storage_offset()}, {1}, first.storage_offset());
  if (uniform) blocks.parts.clear();
  return blocks;
}

}  // namespace torch_overlap
