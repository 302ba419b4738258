#include "torch_overlap/comm/composed.h"

#include <ATen/Functions.h>
#include <c10/core/ScalarType.h>

#include <limits>

namespace torch_overlap {
namespace {

// Up to this size one all-gather of everything is faster than two steps over chunks.
constexpr int64_t kSmallBytes = 64 * 1024;

at::ScalarType accumulator_of(at::ScalarType dtype) {
  const bool narrow_float = c10::isFloatingType(dtype) && c10::elementSize(dtype) < 4;
  return narrow_float ? at::kFloat : dtype;
}

// Returns the signed type of the same width. Sums, products and bitwise results have the same bits
// in both, and ATen has arithmetic only for the signed one.
at::ScalarType signed_twin(at::ScalarType dtype) {
  switch (dtype) {
    case at::kUInt16:
      return at::kShort;
    case at::kUInt32:
      return at::kInt;
    case at::kUInt64:
      return at::kLong;
    default:
      return dtype;
  }
}

void combine(const at::Tensor& acc, const at::Tensor& part, RedOpType op) {
  if (acc.scalar_type() == at::kBool) {
    switch (op) {
      case RedOpType::SUM:
      case RedOpType::MAX:
      case RedOpType::BOR:
        acc.logical_or_(part);
        return;
      case RedOpType::BXOR:
        acc.logical_xor_(part);
        return;
      default:
        acc.logical_and_(part);
        return;
    }
  }
  switch (op) {
    case RedOpType::SUM:
    case RedOpType::AVG:
    case RedOpType::PREMUL_SUM:
      acc.add_(part);
      return;
    case RedOpType::PRODUCT:
      acc.mul_(part);
      return;
    case RedOpType::MIN:
      at::minimum_out(const_cast<at::Tensor&>(acc), acc, part);
      return;
    case RedOpType::MAX:
      at::maximum_out(const_cast<at::Tensor&>(acc), acc, part);
      return;
    case RedOpType::BAND:
      acc.bitwise_and_(part);
      return;
    case RedOpType::BOR:
      acc.bitwise_or_(part);
      return;
    case RedOpType::BXOR:
      acc.bitwise_xor_(part);
      return;
  }
}

// Computes acc / n for an integer sum, truncated toward zero. A uint64 arrives as the int64 with
// the same bits: half of it fits into a signed number, and twice the quotient of that half is at
// most one less than the true quotient.
void divide_integer(const at::Tensor& acc, at::ScalarType dtype, int64_t n) {
  if (dtype == at::kUInt64) {
    const auto half = acc.bitwise_right_shift(1).bitwise_and_(std::numeric_limits<int64_t>::max());
    const auto quotient = half.div(n, "trunc").mul_(2);
    const auto rest = acc.sub(quotient.mul(n));
    acc.copy_(quotient.add_(rest.ge(n)));
  } else if (dtype == at::kUInt16 || dtype == at::kUInt32) {
    const int64_t mask = dtype == at::kUInt16 ? 0xffff : 0xffffffffLL;
    acc.copy_(acc.to(at::kLong).bitwise_and_(mask).div_(n, "trunc"));
  } else {
    acc.div_(n, "trunc");
  }
}

// Flips the top bit, which maps the order of unsigned numbers to that of signed ones, and back.
at::Tensor flip_top_bit(const at::Tensor& bits) {
  const int64_t top = bits.scalar_type() == at::kShort ? std::numeric_limits<int16_t>::min()
                      : bits.scalar_type() == at::kInt ? std::numeric_limits<int32_t>::min()
                                                       : std::numeric_limits<int64_t>::min();
  return bits.bitwise_xor(top);
}

// Returns every rank's PREMUL_SUM factor as fp64, in rank order.
at::Tensor gather_factors(Primitives& primitives, const at::Tensor& like, const ReduceOp& op) {
  if (op.type() != RedOpType::PREMUL_SUM) return {};
  const auto options = at::TensorOptions().device(like.device()).dtype(at::kDouble);
  at::Tensor mine;
  if (const auto* tensor = std::get_if<at::Tensor>(&op.factor())) {
    mine = tensor->detach().reshape({1}).to(at::kDouble);
  } else {
    mine = at::full({1}, std::get<double>(op.factor()), options);
  }
  RankTensors all{at::empty({primitives.size()}, options), {}};
  primitives.all_gather(all, mine);
  return all.flat;
}

// Allocates `count` equal parts like `part`.
RankTensors make_recv_tensors(const at::Tensor& part, int count) {
  return {at::empty({count * part.numel()}, part.options()), {}};
}

// Splits `flat` into one chunk per rank. If it does not divide evenly, the first chunks are one
// element longer.
RankTensors chunks_of(const at::Tensor& flat, int count) {
  RankTensors blocks{flat, {}};
  const int64_t length = flat.numel() / count;
  const int64_t longer = flat.numel() % count;
  if (longer == 0) return blocks;
  int64_t offset = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t mine = length + (i < longer ? 1 : 0);
    blocks.parts.push_back(flat.narrow(0, offset, mine));
    offset += mine;
  }
  return blocks;
}

}  // namespace

void reduce_parts(const at::Tensor& out, const std::vector<at::Tensor>& parts, RedOpType op,
                  const at::Tensor& factors) {
  const auto dtype = out.scalar_type();
  if (c10::isComplexType(dtype)) {  // only linear reductions reach this
    std::vector<at::Tensor> reals;
    for (const auto& part : parts) reals.push_back(at::view_as_real(part).view({-1}));
    reduce_parts(at::view_as_real(out).view({-1}), reals, op, factors);
    return;
  }
  const auto twin = signed_twin(dtype);
  const auto acc_dtype = accumulator_of(twin);
  const bool ordered = op == RedOpType::MIN || op == RedOpType::MAX;
  const bool flip = ordered && twin != dtype;
  const auto load = [&](size_t i) {
    at::Tensor part = parts[i].view({-1});
    if (twin != dtype) part = part.view(twin);
    if (flip) part = flip_top_bit(part);
    part = part.to(acc_dtype);
    return factors.defined() ? part.mul(factors[static_cast<int64_t>(i)].to(acc_dtype)) : part;
  };
  at::Tensor acc = load(0);
  if (acc.is_alias_of(parts[0])) acc = acc.clone();
  for (size_t i = 1; i < parts.size(); ++i) combine(acc, load(i), op);
  if (op == RedOpType::AVG) {
    const auto count = static_cast<int64_t>(parts.size());
    if (c10::isFloatingType(acc_dtype)) {
      acc.div_(count);
    } else {
      divide_integer(acc, dtype, count);
    }
  }
  if (flip) acc = flip_top_bit(acc);
  const at::Tensor flat = out.view({-1});
  (twin == dtype ? flat : flat.view(twin)).copy_(acc);
}

void composed_all_reduce(Primitives& primitives, const at::Tensor& tensor, const ReduceOp& op) {
  const int size = primitives.size();
  const at::Tensor flat = tensor.view({-1});
  const at::Tensor factors = gather_factors(primitives, flat, op);
  if (size == 1 || tensor.nbytes() <= static_cast<size_t>(kSmallBytes)) {
    const RankTensors all = make_recv_tensors(flat, size);
    primitives.all_gather(all, flat);
    reduce_parts(flat, all.all(size), op.type(), factors);
    return;
  }
  const RankTensors chunks = chunks_of(flat, size);
  const at::Tensor mine = at::empty_like(chunks.part(primitives.rank(), size));
  const RankTensors received = make_recv_tensors(mine, size);
  primitives.all_to_all(received, chunks);
  reduce_parts(mine, received.all(size), op.type(), factors);
  primitives.all_gather(chunks, mine);
}

void composed_reduce(Primitives& primitives, const at::Tensor& tensor, const ReduceOp& op,
                     int root) {
  const at::Tensor flat = tensor.view({-1});
  const at::Tensor factors = gather_factors(primitives, flat, op);
  const bool at_root = primitives.rank() == root;
  const RankTensors all = at_root ? make_recv_tensors(flat, primitives.size()) : RankTensors{};
  primitives.gather(all, flat, root);
  if (at_root) reduce_parts(flat, all.all(primitives.size()), op.type(), factors);
}

void composed_reduce_scatter(Primitives& primitives, const at::Tensor& tensor,
                             const RankTensors& in, const ReduceOp& op) {
  const at::Tensor flat = tensor.view({-1});
  const at::Tensor factors = gather_factors(primitives, flat, op);
  const RankTensors received = make_recv_tensors(flat, primitives.size());
  primitives.all_to_all(received, in);
  reduce_parts(flat, received.all(primitives.size()), op.type(), factors);
}

}  // namespace torch_overlap
