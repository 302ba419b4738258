#include "torch_overlap/comm/backends/fake/fake_primitives.h"

#include <ATen/core/Tensor.h>

#include "torch_overlap/comm/composed.h"
#include "torch_overlap/symm/symmetric_memory.h"

namespace torch_overlap {
namespace {

// Copies the elements of `from`. The shapes may differ, the numbers of elements may not.
void copy_elements(const at::Tensor& to, const at::Tensor& from) {
  to.view({-1}).copy_(from.reshape({-1}));
}

void fill_zero(const at::Tensor& tensor) {
  // Filled as bytes: some dtypes cannot be filled.
  if (tensor.numel() > 0) tensor.view({-1}).view(at::kByte).zero_();
}

// Reduces `n` copies of `one` into `out`. Each step reduces two equal halves, so the number of
// reductions grows with the logarithm of n.
void repeat(const at::Tensor& out, const at::Tensor& one, RedOpType op, int64_t n) {
  at::Tensor result;
  at::Tensor power = one.clone();
  for (; n > 0; n >>= 1) {
    if (n & 1) {
      if (result.defined()) {
        reduce_parts(result, {result, power}, op, {});
      } else {
        result = power.clone();
      }
    }
    if (n > 1) reduce_parts(power, {power, power}, op, {});
  }
  out.copy_(result);
}

// Computes in fp32 for 8- and 16-bit floats, so that the steps of repeat() do not round each time.
void reduce_equal(const at::Tensor& tensor, const ReduceOp& op, int64_t n) {
  const at::Tensor flat = tensor.view({-1});
  switch (op.type()) {
    case RedOpType::AVG:
    case RedOpType::MIN:
    case RedOpType::MAX:
    case RedOpType::BAND:
    case RedOpType::BOR:
      return;
    default:
      break;
  }
  const auto dtype = tensor.scalar_type();
  const bool narrow = c10::isFloatingType(dtype) && c10::elementSize(dtype) < 4;
  at::Tensor one = narrow ? flat.to(at::kFloat) : flat;
  RedOpType type = op.type();
  if (type == RedOpType::PREMUL_SUM) {
    const auto* factor = std::get_if<at::Tensor>(&op.factor());
    one = factor != nullptr
              ? one.mul(factor->reshape({}).to(c10::toRealValueType(one.scalar_type())))
              : one.mul(std::get<double>(op.factor()));
    type = RedOpType::SUM;
  }
  repeat(flat, one, type, n);
}

}  // namespace

void FakePrimitives::p2p(const std::vector<P2POp>& ops) {
  std::vector<at::Tensor> to_self;
  for (const P2POp& op : ops) {
    if (op.type == P2POp::Type::SEND && op.peer == rank()) to_self.push_back(op.tensor);
  }
  size_t taken = 0;
  for (const P2POp& op : ops) {
    if (op.type == P2POp::Type::SEND) continue;
    if (op.peer == rank()) {
      copy_elements(op.tensor, to_self.at(taken++));
    } else {
      fill_zero(op.tensor);
    }
  }
}

void FakePrimitives::all_reduce(const at::Tensor& tensor, const ReduceOp& op) {
  reduce_equal(tensor, op, size());
}

void FakePrimitives::reduce(const at::Tensor& tensor, const ReduceOp& op, int root) {
  if (rank() == root) reduce_equal(tensor, op, size());
}

void FakePrimitives::all_gather(const RankTensors& out, const at::Tensor& tensor) {
  const at::Tensor own = tensor.clone();  // the input may be one of the parts
  for (int r = 0; r < size(); ++r) {
    const at::Tensor part = out.part(r, size());
    // Sizes may differ by rank: a part of another size has no known data.
    if (part.numel() == own.numel()) {
      copy_elements(part, own);
    } else {
      fill_zero(part);
    }
  }
}

void FakePrimitives::reduce_scatter(const at::Tensor& tensor, const RankTensors& in,
                                    const ReduceOp& op) {
  copy_elements(tensor, in.part(rank(), size()));
  reduce_equal(tensor, op, size());
}

void FakePrimitives::all_to_all(const RankTensors& out, const RankTensors& in) {
  all_gather(out, in.part(rank(), size()));
}

void FakePrimitives::scatter(const at::Tensor& tensor, const RankTensors& in, int root) {
  if (rank() == root) {
    copy_elements(tensor, in.part(root, size()));
  } else {
    fill_zero(tensor);
  }
}

void FakePrimitives::gather(const RankTensors& out, const at::Tensor& tensor, int root) {
  if (rank() == root) all_gather(out, tensor);
}

void FakePrimitives::put(SymmetricMemory& window, const at::Tensor& tensor, int dst,
                         int64_t offset) {
  if (dst != rank() || window.pointer(dst) == nullptr) return;
  window.view(dst, tensor.sizes(), tensor.scalar_type(), offset).copy_(tensor);
}

}  // namespace torch_overlap
