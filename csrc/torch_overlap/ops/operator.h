#pragma once

#include <ATen/autocast_mode.h>

#include <tuple>
#include <type_traits>
#include <vector>

#include "torch_overlap/ops/register.h"
#include "torch_overlap/ops/schema.h"

// An operator is a struct that declares its arguments once, as fields in the order of the schema; a
// value of it is one call:
//
//   struct MatmulAllReduce {                                          // in ops.h
//     using Result = Tensor;
//     static constexpr const char* kName = "matmul_all_reduce";
//     Tensor x;
//     ...
//     TORCH_OVERLAP_FIELDS(x, ...);
//   };
//
// From it come the schema, the signature, the call through the dispatcher, the Meta kernel (the
// real kernel, which returns after it has allocated the results; see is_shape_only()), autocast,
// and the bookkeeping of the gradient (autograd.h).
namespace torch_overlap::ops {

// The type of a field as an argument of a kernel.
template <typename T>
struct ParameterType {
  using type = T;
};
template <>
struct ParameterType<Tensor> {
  using type = const Tensor&;
};
template <>
struct ParameterType<std::optional<Tensor>> {
  using type = const std::optional<Tensor>&;
};
template <>
struct ParameterType<OptionalScalar> {
  using type = const OptionalScalar&;
};
template <typename Element>
struct ParameterType<std::vector<Element>> {
  using type = at::ArrayRef<Element>;
};
template <>
struct ParameterType<OptionalTensors> {
  using type = const OptionalTensors&;
};
template <>
struct ParameterType<MainGrads> {
  using type = const MainGrads&;
};
template <typename T>
using Parameter = typename ParameterType<T>::type;

template <typename Op, typename... Fields>
class OperatorOf<Op, std::tuple<const Fields&...>> {
 public:
  using Result = typename Op::Result;

  // Calls the operator through the dispatcher.
  static Result dispatch(const Op& call) {
    static const auto handle = find_op<Result(Parameter<Fields>...)>(Op::kName);
    return std::apply([](const Fields&... fields) { return handle.call(fields...); },
                      call.fields());
  }

  // kKernel with the arguments of the schema.
  template <auto kKernel>
  static Result unpacked(Parameter<Fields>... arguments) {
    return kKernel(Op{field<Fields>(arguments)...});
  }

 private:
  template <typename Field>
  static Field field(Parameter<Field> argument) {
    if constexpr (requires { typename Field::allocator_type; }) {  // std::vector
      return argument.vec();
    } else if constexpr (std::is_same_v<Field, std::optional<Tensor>>) {
      return argument && argument->defined() ? argument : std::nullopt;
    } else {
      return argument;
    }
  }
};

// Casts the operands of a product to the autocast dtype, as torch.nn.functional.linear does.
template <c10::DeviceType kDevice>
class Autocast {
 public:
  Tensor operator()(const Tensor& tensor) const {
    return at::autocast::cached_cast(dtype_, tensor, kDevice);
  }
  std::optional<Tensor> operator()(const std::optional<Tensor>& tensor) const {
    return tensor ? std::optional((*this)(*tensor)) : std::nullopt;
  }
  std::vector<Tensor> operator()(const std::vector<Tensor>& tensors) const {
    std::vector<Tensor> cast;
    for (const auto& tensor : tensors) cast.push_back((*this)(tensor));
    return cast;
  }
  OptionalTensors operator()(const OptionalTensors& tensors) const {
    OptionalTensors cast;
    for (size_t i = 0; i < tensors.size(); ++i) cast.push_back((*this)(tensors.get(i)));
    return cast;
  }
  template <typename T>
  T operator()(const T& attribute) const {
    return attribute;
  }

 private:
  const at::ScalarType dtype_ = at::autocast::get_autocast_dtype(kDevice);
  const c10::impl::ExcludeDispatchKeyGuard below_{
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice)};
};

template <typename Op, c10::DeviceType kDevice>
typename Op::Result autocast_kernel(const Op& call) {
  const Autocast<kDevice> cast;
  Op casted = std::apply([&](const auto&... fields) { return Op{cast(fields)...}; }, call.fields());
  // The operand of a collective that is no product keeps its dtype.
  if constexpr (requires { call.other; }) casted.other = call.other;
  return Operator<Op>::dispatch(casted);
}

// Defines the operator, with `kernel` for every backend and for Meta.
#define TORCH_OVERLAP_OPERATOR(Op, kernel)        \
  TORCH_OVERLAP_SCHEMAS(schema_of<Op>(Op::kName)) \
  TORCH_OVERLAP_KERNELS(CompositeExplicitAutograd, m) { m.impl<Op, kernel>(); }
#define TORCH_OVERLAP_AUTOGRAD(Op, kernel) \
  TORCH_OVERLAP_KERNELS(Autograd, m) { m.impl<Op, kernel>(); }
// Registers autocast on CPUs and GPUs.
#define TORCH_OVERLAP_AUTOCAST(Op)                                                       \
  TORCH_OVERLAP_KERNELS(AutocastCPU, m) { m.impl<Op, autocast_kernel<Op, at::kCPU>>(); } \
  TORCH_OVERLAP_KERNELS(AutocastCUDA, m) { m.impl<Op, autocast_kernel<Op, at::kCUDA>>(); }

}  // namespace torch_overlap::ops
