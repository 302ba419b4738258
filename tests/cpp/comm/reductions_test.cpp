// Every (op, dtype) pair against a reference of higher precision, and every pair that is refused.
// docs/reference/errors.md lists the legal pairs.

#include <cmath>
#include <type_traits>

#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>

#include "comm/local_ranks.h"
#include "torch_overlap/comm/composed.h"

namespace torch_overlap {
namespace {

using namespace testing;  // NOLINT

constexpr RedOpType kOps[] = {RedOpType::SUM,  RedOpType::PRODUCT,    RedOpType::MIN,
                              RedOpType::MAX,  RedOpType::BAND,       RedOpType::BOR,
                              RedOpType::BXOR, RedOpType::PREMUL_SUM, RedOpType::AVG};
constexpr at::ScalarType kDtypes[] = {
    at::kByte,         at::kChar,         at::kShort,  at::kInt,           at::kLong,
    at::kUInt16,       at::kUInt32,       at::kUInt64, at::kBool,          at::kHalf,
    at::kBFloat16,     at::kFloat,        at::kDouble, at::kFloat8_e4m3fn, at::kFloat8_e5m2,
    at::kComplexFloat, at::kComplexDouble};

bool is_legal(RedOpType op, at::ScalarType dtype) {
  const bool floating = c10::isFloatingType(dtype);
  const bool linear = op == RedOpType::SUM || op == RedOpType::AVG || op == RedOpType::PREMUL_SUM;
  const bool bitwise = op == RedOpType::BAND || op == RedOpType::BOR || op == RedOpType::BXOR;
  if (c10::isComplexType(dtype)) return linear;
  if (floating) return !bitwise;
  if (op == RedOpType::PREMUL_SUM) return false;
  return dtype != at::kBool || op != RedOpType::AVG;
}

double factor_of(int rank) { return 0.5 + rank; }

// Reduces one element of every rank, as the header specifies.
template <typename T>
T reference(const std::vector<T>& values, RedOpType op) {
  const int n = static_cast<int>(values.size());
  if constexpr (std::is_same_v<T, bool>) {
    int count = 0;
    for (const bool value : values) count += value;
    switch (op) {
      case RedOpType::SUM:
      case RedOpType::MAX:
      case RedOpType::BOR:
        return count > 0;
      case RedOpType::BXOR:
        return count % 2 == 1;
      default:
        return count == n;
    }
  } else if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;  // wraps, like the dtype
    uint64_t sum = 0, product = 1;
    U band = ~U{0}, bor = 0, bxor = 0;
    T least = values[0], most = values[0];
    for (const T value : values) {
      sum += static_cast<uint64_t>(value);
      product *= static_cast<uint64_t>(value);
      band &= static_cast<U>(value);
      bor |= static_cast<U>(value);
      bxor ^= static_cast<U>(value);
      least = std::min(least, value);
      most = std::max(most, value);
    }
    switch (op) {
      case RedOpType::SUM:
        return static_cast<T>(sum);
      case RedOpType::AVG:
        return static_cast<T>(static_cast<T>(sum) /
                              static_cast<std::conditional_t<sizeof(T) == 8, T, int64_t>>(n));
      case RedOpType::PRODUCT:
        return static_cast<T>(product);
      case RedOpType::MIN:
        return least;
      case RedOpType::MAX:
        return most;
      case RedOpType::BAND:
        return static_cast<T>(band);
      case RedOpType::BOR:
        return static_cast<T>(bor);
      default:
        return static_cast<T>(bxor);
    }
  } else {
    long double sum = 0, premul = 0, product = 1;
    long double least = values[0], most = values[0];
    for (int r = 0; r < n; ++r) {
      const long double value = static_cast<double>(values[r]);
      sum += value;
      premul += factor_of(r) * value;
      product *= value;
      least = std::min(least, value);
      most = std::max(most, value);
    }
    const long double result = op == RedOpType::SUM          ? sum
                               : op == RedOpType::AVG        ? sum / n
                               : op == RedOpType::PREMUL_SUM ? premul
                               : op == RedOpType::PRODUCT    ? product
                               : op == RedOpType::MIN        ? least
                                                             : most;
    return static_cast<T>(static_cast<double>(result));
  }
}

// Integers cover their whole range, except for AVG: the quotient of a wrapped sum is meaningless.
at::Tensor input_of(int rank, at::ScalarType dtype, RedOpType op, int64_t numel) {
  auto generator = at::detail::createCPUGenerator(
      run_seed() * 77 + rank * 1009 + static_cast<int>(dtype) * 31 + static_cast<int>(op));
  if (c10::isFloatingType(dtype) || c10::isComplexType(dtype)) {
    const auto real = at::randn({numel, 2}, generator, at::TensorOptions().dtype(at::kDouble));
    return c10::isComplexType(dtype) ? at::view_as_complex(real).to(dtype)
                                     : real.select(1, 0).contiguous().to(dtype);
  }
  if (dtype == at::kBool) return at::randint(0, 2, {numel}, generator, at::kLong).to(at::kBool);
  if (op == RedOpType::AVG) {
    const bool is_signed = c10::isSignedType(dtype);
    return at::randint(is_signed ? -30 : 0, 31, {numel}, generator, at::kLong).to(dtype);
  }
  const auto bytes = at::randint(0, 256, {numel * static_cast<int64_t>(c10::elementSize(dtype))},
                                 generator, at::kLong);
  return bytes.to(at::kByte).view(dtype);
}

template <typename T>
double tolerance() {
  if constexpr (std::is_same_v<T, float>) return 1e-6;
  if constexpr (std::is_same_v<T, double>) return 1e-14;
  if constexpr (std::is_same_v<T, at::Half>) return 0x1p-10;
  if constexpr (std::is_same_v<T, at::BFloat16>) return 0x1p-7;
  if constexpr (std::is_same_v<T, c10::Float8_e4m3fn>) return 0x1p-3;
  if constexpr (std::is_same_v<T, c10::Float8_e5m2>) return 0x1p-2;
  return 0;
}

template <typename T>
void expect_reduced(const at::Tensor& got, const std::vector<at::Tensor>& inputs, RedOpType op) {
  for (int64_t i = 0; i < got.numel(); ++i) {
    std::vector<T> values;
    double scale = 0;  // sums cancel: the error is relative to the magnitudes of the terms
    for (size_t r = 0; r < inputs.size(); ++r) {
      values.push_back(static_cast<const T*>(inputs[r].const_data_ptr())[i]);
      scale += std::abs(static_cast<double>(values.back())) *
               (op == RedOpType::PREMUL_SUM ? factor_of(r) : 1);
    }
    const T expected = reference<T>(values, op);
    const T mine = static_cast<const T*>(got.const_data_ptr())[i];
    if constexpr (std::is_integral_v<T>) {
      ASSERT_EQ(mine, expected) << to_string(op) << " of " << got.scalar_type() << " at " << i;
    } else {
      const double wide = static_cast<double>(expected);
      // One rounding to the dtype, and the roundings of fp32 before it.
      const double allowed =
          tolerance<T>() * std::abs(wide) + 1e-6 * scale * (sizeof(T) < 8) + 1e-14 * scale;
      ASSERT_LE(std::abs(static_cast<double>(mine) - wide), allowed)
          << to_string(op) << " of " << got.scalar_type() << " at " << i << ": expected " << wide;
    }
  }
}

void expect_reduced(const at::Tensor& got, const std::vector<at::Tensor>& inputs, RedOpType op) {
  switch (got.scalar_type()) {
#define TYPE(scalar, type) \
  case at::scalar:         \
    return expect_reduced<type>(got, inputs, op);
    TYPE(kByte, uint8_t)
    TYPE(kChar, int8_t)
    TYPE(kShort, int16_t)
    TYPE(kInt, int32_t)
    TYPE(kLong, int64_t)
    TYPE(kUInt16, uint16_t)
    TYPE(kUInt32, uint32_t)
    TYPE(kUInt64, uint64_t)
    TYPE(kBool, bool)
    TYPE(kHalf, at::Half)
    TYPE(kBFloat16, at::BFloat16)
    TYPE(kFloat, float)
    TYPE(kDouble, double)
    TYPE(kFloat8_e4m3fn, c10::Float8_e4m3fn)
    TYPE(kFloat8_e5m2, c10::Float8_e5m2)
#undef TYPE
    default: {  // complex: the real and imaginary parts are reduced separately
      std::vector<at::Tensor> reals;
      for (const auto& input : inputs) reals.push_back(at::view_as_real(input).contiguous());
      return expect_reduced(at::view_as_real(got).contiguous(), reals, op);
    }
  }
}

ReduceOp make_op(RedOpType type, int rank) {
  return type == RedOpType::PREMUL_SUM ? ReduceOp::premul_sum(factor_of(rank)) : ReduceOp(type);
}

std::vector<at::Tensor> inputs_of(int size, at::ScalarType dtype, RedOpType op, int64_t numel) {
  std::vector<at::Tensor> inputs;
  for (int r = 0; r < size; ++r) inputs.push_back(input_of(r, dtype, op, numel));
  return inputs;
}

TEST(Reductions, EveryLegalPairIsRight) {
  run_local_ranks(3, [](const Comm& comm) {
    for (const auto dtype : kDtypes) {
      for (const auto type : kOps) {
        if (!is_legal(type, dtype)) continue;
        const ReduceOp op = make_op(type, comm->rank());
        const auto inputs = inputs_of(3, dtype, type, 33);
        const at::Tensor& mine = inputs[comm->rank()];

        const at::Tensor all = mine.clone();
        comm->all_reduce(all, op, false);
        expect_reduced(all, inputs, type);

        const at::Tensor rooted = mine.clone();
        comm->reduce(rooted, 1, op, false);
        if (comm->rank() == 1) {
          expect_reduced(rooted, inputs, type);
        } else {
          EXPECT_TRUE(rooted.view(at::kByte).equal(mine.view(at::kByte)));
        }

        const at::Tensor part = at::ones({11}).to(dtype);
        comm->reduce_scatter_single(part, mine, op, false);
        std::vector<at::Tensor> parts;
        for (const auto& input : inputs) parts.push_back(input.narrow(0, 11 * comm->rank(), 11));
        expect_reduced(part, parts, type);
      }
    }
  });
}

TEST(Reductions, EveryOtherPairIsRefusedAndLeavesTheCommunicatorUsable) {
  run_local_ranks(2, [](const Comm& comm) {
    for (const auto dtype : kDtypes) {
      for (const auto type : kOps) {
        if (is_legal(type, dtype)) continue;
        const at::Tensor x = at::ones({4}).to(dtype);
        const Error error =
            error_of([&] { comm->all_reduce(x, make_op(type, comm->rank()), false); });
        EXPECT_EQ(error.kind(), ErrorKind::kType) << to_string(type) << " of " << dtype;
        EXPECT_TRUE(contains(error.what(), "all_reduce: expected")) << error.what();
      }
    }
    at::Tensor x = at::ones({4});
    comm->all_reduce(x, RedOpType::SUM, false);
    expect_equal(x, at::full({4}, 2));
  });
}

TEST(Reductions, LargeTensorsOfNarrowFloatsRoundOnce) {
  for (const int size : {2, 3, 4}) {
    run_local_ranks(size, [](const Comm& comm) {
      for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat8_e4m3fn, at::kFloat}) {
        const auto inputs = inputs_of(comm->size(), dtype, RedOpType::SUM, 70'001);
        const at::Tensor x = inputs[comm->rank()].clone();
        comm->all_reduce(x, RedOpType::SUM, true)->wait();
        expect_reduced(x, inputs, RedOpType::SUM);
      }
    });
  }
}

TEST(Reductions, EveryRankGetsTheSameBits) {
  std::vector<at::Tensor> results(4);
  run_local_ranks(4, [&](const Comm& comm) {
    const at::Tensor x = input_of(comm->rank(), at::kFloat, RedOpType::SUM, 30'000);
    comm->all_reduce(x, RedOpType::AVG, false);
    results[comm->rank()] = x;
  });
  for (int r = 1; r < 4; ++r) EXPECT_TRUE(results[r].equal(results[0])) << "rank " << r;
}

TEST(Reductions, AFactorMayBeATensorAndDiffersByRank) {
  run_local_ranks(2, [](const Comm& comm) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kComplexFloat}) {
      const auto inputs = inputs_of(2, dtype, RedOpType::PREMUL_SUM, 20);
      const at::Tensor x = inputs[comm->rank()].clone();
      const at::Tensor factor =
          at::full({1}, factor_of(comm->rank())).to(c10::toRealValueType(dtype));
      comm->all_reduce(x, ReduceOp::premul_sum(factor), true)->wait();
      expect_reduced(x, inputs, RedOpType::PREMUL_SUM);
    }
  });
}

TEST(Reductions, ATensorThatRequiresGradIsReducedInPlace) {
  run_local_ranks(2, [](const Comm& comm) {
    at::Tensor x = at::ones({5}).set_requires_grad(true);
    comm->all_reduce(x, RedOpType::SUM, false);
    comm->all_reduce(x, RedOpType::SUM, true)->wait();
    expect_equal(x.detach(), at::full({5}, 4));
    EXPECT_TRUE(x.is_leaf());
  });
}

}  // namespace
}  // namespace torch_overlap
