#include "torch_overlap/comm/backends/nccl/reduction.h"

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstring>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

std::optional<ncclDataType_t> native_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kChar:
      return ncclInt8;
    case at::kByte:
    case at::kBool:
      return ncclUint8;
    case at::kInt:
      return ncclInt32;
    case at::kUInt32:
      return ncclUint32;
    case at::kLong:
      return ncclInt64;
    case at::kUInt64:
      return ncclUint64;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    default:
      return std::nullopt;
  }
}

// The bytes of bool are 0 and 1: "any" is their maximum and "all" their minimum.
std::optional<ncclRedOp_t> bool_op(RedOpType type) {
  switch (type) {
    case RedOpType::SUM:
    case RedOpType::MAX:
    case RedOpType::BOR:
      return ncclMax;
    case RedOpType::PRODUCT:
    case RedOpType::MIN:
    case RedOpType::BAND:
      return ncclMin;
    default:
      return std::nullopt;
  }
}

std::optional<ncclRedOp_t> number_op(RedOpType type) {
  switch (type) {
    case RedOpType::SUM:
    case RedOpType::PREMUL_SUM:
      return ncclSum;
    case RedOpType::PRODUCT:
      return ncclProd;
    case RedOpType::MIN:
      return ncclMin;
    case RedOpType::MAX:
      return ncclMax;
    case RedOpType::AVG:
      return ncclAvg;
    default:
      return std::nullopt;
  }
}

template <typename T>
uint64_t bits_of(double value) {
  const auto typed = static_cast<T>(value);
  uint64_t bits = 0;
  std::memcpy(&bits, &typed, sizeof(typed));
  return bits;
}

// Returns `value` in the memory format of `dtype`.
uint64_t scalar_bits(ncclDataType_t dtype, double value) {
  switch (dtype) {
    case ncclFloat16:
      return bits_of<c10::Half>(value);
    case ncclBfloat16:
      return bits_of<c10::BFloat16>(value);
    case ncclFloat32:
      return bits_of<float>(value);
    case ncclFloat64:
      return bits_of<double>(value);
    default:
      fail(ErrorKind::kType, "PREMUL_SUM: expected a floating dtype, got NCCL's dtype ",
           static_cast<int>(dtype));
  }
}

}  // namespace

std::optional<NativeReduction> native_reduction(at::ScalarType dtype, const ReduceOp& op) {
  const bool complex = c10::isComplexType(dtype);
  const auto native = native_dtype(complex ? c10::toRealValueType(dtype) : dtype);
  const auto native_op = dtype == at::kBool ? bool_op(op.type()) : number_op(op.type());
  if (!native || !native_op) return std::nullopt;
  return NativeReduction{*native, *native_op, complex ? 2 : 1};
}

std::optional<NativeReduction> nccl_reduction(at::ScalarType dtype, const ReduceOp& op, int size) {
  if (size == 1 && op.type() == RedOpType::PREMUL_SUM) return std::nullopt;
  const bool is_ordered = op.type() == RedOpType::MIN || op.type() == RedOpType::MAX;
  if (is_ordered && c10::isFloatingType(dtype)) return std::nullopt;
  const bool is_copy = size == 1 && op.type() == RedOpType::AVG;
  return native_reduction(dtype, is_copy ? ReduceOp(RedOpType::SUM) : op);
}

NcclRedOp::NcclRedOp(const NcclApi& api, ncclComm_t comm, const NativeReduction& native,
                     const ReduceOp& op)
    : api_(api), comm_(comm), op_(native.op) {
  if (op.type() != RedOpType::PREMUL_SUM) return;
  if (const auto* tensor = std::get_if<at::Tensor>(&op.factor())) {
    nccl_check(api_,
               api_.red_op_create_premul_sum(&op_, const_cast<void*>(tensor->const_data_ptr()),
                                             native.dtype, ncclScalarDevice, comm_),
               "ncclRedOpCreatePreMulSum");
  } else {
    uint64_t bits = scalar_bits(native.dtype, std::get<double>(op.factor()));
    nccl_check(
        api_,
        api_.red_op_create_premul_sum(&op_, &bits, native.dtype, ncclScalarHostImmediate, comm_),
        "ncclRedOpCreatePreMulSum");
  }
  owned_ = true;
}

NcclRedOp::~NcclRedOp() {
  if (owned_) (void)api_.red_op_destroy(op_, comm_);
}

}  // namespace torch_overlap
