#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <bit>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_overlap/ops/operator.h"

// The gradient of an operator that operator.h describes. An operator that has one adds:
//
//   TORCH_OVERLAP_SAVED(x, weight)   // kept for backward
//   static void backward(Backward<Op>& pass);
//
// It may add `static variable_list saved_results(const Op&, const variable_list& results)`, beside
// SAVED, and `static variable_list non_differentiable(const variable_list& results)`. An operator
// without SAVED is a collective or a cast, in whose backward() all ranks take part: it gets zeros
// for the gradient of a result that was not used.
//
// backward() finds saved complex tensors conjugated: the operators are products, and the gradient
// of a factor has the conjugate of the other one.
namespace torch_overlap::ops {

// The tensors of a field, for which a gradient may be asked.
inline void append_tensors(const Tensor& field, variable_list& tensors) {
  if (field.defined()) tensors.push_back(field);
}
inline void append_tensors(const std::optional<Tensor>& field, variable_list& tensors) {
  if (field) append_tensors(*field, tensors);
}
inline void append_tensors(const std::vector<Tensor>& field, variable_list& tensors) {
  tensors.insert(tensors.end(), field.begin(), field.end());
}
inline void append_tensors(const OptionalTensors& field, variable_list& tensors) {
  for (size_t i = 0; i < field.size(); ++i)
    append_tensors(std::optional<Tensor>(field.get(i)), tensors);
}
template <typename Attribute>
void append_tensors(const Attribute&, variable_list&) {}

template <typename Op>
variable_list tensors_of(const Op& call) {
  variable_list tensors;
  std::apply([&](const auto&... fields) { (append_tensors(fields, tensors), ...); }, call.fields());
  return tensors;
}

// True if the gradient of an operand of the call may be asked for.
inline bool needs_autograd(const std::optional<Tensor>& field) {
  return field && needs_autograd(*field);
}
inline bool needs_autograd(const std::vector<Tensor>& field) {
  return std::any_of(field.begin(), field.end(),
                     [](const Tensor& tensor) { return needs_autograd(tensor); });
}
inline bool needs_autograd(const OptionalTensors& field) {
  for (size_t i = 0; i < field.size(); ++i) {
    if (needs_autograd(std::optional<Tensor>(field.get(i)))) return true;
  }
  return false;
}
template <typename Attribute>
  requires(std::is_arithmetic_v<Attribute> || std::is_enum_v<Attribute> ||
           std::is_same_v<Attribute, std::string_view> ||
           std::is_same_v<Attribute, std::vector<int64_t>> ||
           std::is_same_v<Attribute, std::vector<c10::SymInt>> ||
           std::is_same_v<Attribute, OptionalScalar> || std::is_same_v<Attribute, MainGrads>)
bool needs_autograd(const Attribute&) {
  return false;
}
template <typename Op>
  requires requires { Op::kName; }
bool needs_autograd(const Op& call) {
  return std::apply([](const auto&... fields) { return (needs_autograd(fields) || ...); },
                    call.fields());
}

// Conversions of the results of an operator.
inline variable_list to_list(Tensor result) { return {std::move(result)}; }
inline variable_list to_list(std::vector<Tensor> result) { return result; }
inline variable_list to_list(std::tuple<Tensor, Tensor> result) {
  auto& [first, second] = result;
  return {std::move(first), std::move(second)};
}
inline variable_list to_list(std::tuple<std::vector<Tensor>, Tensor> result) {
  auto& [list, last] = result;
  list.push_back(std::move(last));
  return std::move(list);
}
template <typename Result>
Result from_list(variable_list list) {
  if constexpr (std::is_same_v<Result, Tensor>) {
    return std::move(list[0]);
  } else if constexpr (std::is_same_v<Result, variable_list>) {
    return list;
  } else if constexpr (std::is_same_v<Result, std::tuple<Tensor, Tensor>>) {
    return {std::move(list[0]), std::move(list[1])};
  } else {
    auto last = std::move(list.back());
    list.pop_back();
    return {std::move(list), std::move(last)};
  }
}

// A backward pass: the call, its saved tensors, the gradients of its results, and those of its
// operands, which Op::backward() sets.
template <typename Op>
class Backward {
 public:
  Backward(AutogradContext* context, const variable_list& result_grads)
      : grads(result_grads), context_(context) {
    // Elements of a tuple that the context keeps: strings are referred to, not copied.
    const auto stored = context->saved_data.at(kKey).toTupleRef().elements().asArrayRef();
    size_t field = 0;
    std::apply([&](auto&... fields) { (restore(fields, stored[field++]), ...); }, call.fields());
    gradients_.resize(num_operands_ + 1);  // the call itself is an argument, too
    // A graph without saved tensors may be used by several backward passes.
    if constexpr (requires { call.saved(); }) {
      const auto tensors = context->get_saved_variables();
      size_t next = 0;
      std::apply([&](auto&... fields) { (take(fields, tensors, next), ...); }, call.saved());
      for (; next < tensors.size(); ++next) saved_results.push_back(conjugate(tensors[next]));
    }
  }

  // The attributes, and the tensors that were saved, conjugated. A tensor that was not is
  // undefined; has() tells if there was one.
  Op call{};
  variable_list saved_results;
  const variable_list& grads;

  template <typename Field>
  bool has(const Field& field, size_t i = 0) const {
    return position(field, i) >= 0;
  }
  // True if the gradient of this operand is needed.
  template <typename Field>
  bool wants(const Field& field, size_t i = 0) const {
    const int64_t at = position(field, i);
    return at >= 0 && context_->needs_input_grad(static_cast<size_t>(at));
  }
  template <typename Field>
  void set(const Field& field, Tensor gradient, size_t i = 0) {
    gradients_.at(static_cast<size_t>(position(field, i))) = std::move(gradient);
  }
  variable_list finish() && { return std::move(gradients_); }

  // Stores what the constructor needs.
  static void save(AutogradContext* context, const Op& call, const variable_list& results) {
    context->saved_data.emplace(
        kKey, std::apply(
                  [](const auto&... fields) {
                    return c10::ivalue::Tuple::create(std::vector<IValue>{stored_value(fields)...});
                  },
                  call.fields()));
    if constexpr (requires { call.saved(); }) {
      variable_list tensors;
      std::apply([&](const auto&... fields) { (append_tensors(fields, tensors), ...); },
                 call.saved());
      if constexpr (requires { Op::saved_results(call, results); }) {
        const auto kept = Op::saved_results(call, results);
        tensors.insert(tensors.end(), kept.begin(), kept.end());
      }
      context->save_for_backward(std::move(tensors));
    }
  }

 private:
  static constexpr const char* kKey = "call";
  static constexpr size_t kMaxOperands = 48;  // of a field

  // The operands of a field: their number, and a bit for each that exists.
  struct Operands {
    const void* field = nullptr;
    int64_t first = 0;  // position of the first one among the inputs
    uint64_t count = 0;
    uint64_t exists = 0;

    void add(bool one_exists) { exists |= uint64_t{one_exists} << count++; }
  };
  static Operands operands_of(const Tensor&) { return {.count = 1, .exists = 1}; }
  static Operands operands_of(const std::optional<Tensor>& field) {
    return {.count = 1, .exists = uint64_t{field && field->defined()}};
  }
  static Operands operands_of(const std::vector<Tensor>& field) {
    Operands operands;
    for (size_t i = 0; i < field.size() && i <= kMaxOperands; ++i) operands.add(true);
    return operands;
  }
  static Operands operands_of(const OptionalTensors& field) {
    Operands operands;
    for (size_t i = 0; i < field.size() && i <= kMaxOperands; ++i) {
      operands.add(optional_at(field, i).has_value());
    }
    return operands;
  }

  template <typename Field>
  static constexpr bool kIsTensors =
      std::is_same_v<Field, Tensor> || std::is_same_v<Field, std::optional<Tensor>> ||
      std::is_same_v<Field, std::vector<Tensor>> || std::is_same_v<Field, OptionalTensors>;

  template <typename Field>
  static IValue stored_value(const Field& field) {
    if constexpr (kIsTensors<Field>) {
      const Operands operands = operands_of(field);
      TORCH_OVERLAP_CHECK(operands.count <= kMaxOperands, kUnsupported, Op::kName,
                          ": expected at most ", kMaxOperands,
                          " tensors in a list, got more. Split the list.");
      return static_cast<int64_t>(operands.exists << 8 | operands.count);
    } else if constexpr (std::is_same_v<Field, std::string_view>) {
      return std::string(field);
    } else if constexpr (std::is_same_v<Field, std::vector<c10::SymInt>>) {
      return c10::SymIntArrayRef(field);
    } else {
      return field;
    }
  }

  template <typename Field>
  void restore(Field& field, const IValue& value) {
    if constexpr (kIsTensors<Field>) {
      const auto bits = static_cast<uint64_t>(value.toInt());
      const Operands operands{
          .field = &field, .first = num_operands_, .count = bits & 0xff, .exists = bits >> 8};
      num_operands_ += std::popcount(operands.exists);
      if constexpr (std::is_same_v<Field, std::vector<Tensor>>) field.resize(operands.count);
      operands_.push_back(operands);
    } else if constexpr (std::is_same_v<Field, std::string_view>) {
      field = value.toStringRef();
    } else if constexpr (std::is_same_v<Field, std::vector<c10::SymInt>>) {
      field = value.toSymIntVector();
    } else {
      field = value.to<Field>();
    }
  }

  static Tensor conjugate(const Tensor& saved) {
    return saved.is_complex() ? saved.conj().resolve_conj() : saved;
  }
  static void take(Tensor& field, const variable_list& saved, size_t& next) {
    field = conjugate(saved.at(next++));
  }
  // An optional tensor is among the saved ones if has() says so.
  void take(std::optional<Tensor>& field, const variable_list& saved, size_t& next) {
    if (has(field)) field = conjugate(saved.at(next++));
  }
  static void take(std::vector<Tensor>& fields, const variable_list& saved, size_t& next) {
    for (Tensor& field : fields) take(field, saved, next);
  }

  // Returns the position of an operand among the inputs; -1 if it does not exist.
  template <typename Field>
  int64_t position(const Field& field, size_t i) const {
    for (const Operands& operands : operands_) {
      if (operands.field != &field || i >= operands.count) continue;
      if ((operands.exists >> i & 1) == 0) return -1;
      return operands.first + std::popcount(operands.exists & ((uint64_t{1} << i) - 1));
    }
    return -1;
  }

  AutogradContext* context_;
  c10::SmallVector<Operands, 4> operands_;
  int64_t num_operands_ = 0;
  variable_list gradients_;
};

// kForward computes the results, below autograd.
template <typename Op, auto kForward = Operator<Op>::dispatch>
class OpFunction : public Function<OpFunction<Op, kForward>> {
 public:
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* context, at::TensorList, const Op& call) {
    const BelowAutograd guard;
    auto results = to_list(kForward(call));
    Backward<Op>::save(context, call, results);
    context->set_materialize_grads(!requires { call.saved(); });
    if constexpr (requires { Op::non_differentiable(results); }) {
      context->mark_non_differentiable(Op::non_differentiable(results));
    }
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    Backward<Op> pass(context, grads);
    Op::backward(pass);
    return std::move(pass).finish();
  }
};

// The Autograd kernel of a call.
template <typename Op>
typename Op::Result autograd_kernel(const Op& call) {
  if (!needs_autograd(call)) {
    const BelowAutograd guard;
    return Operator<Op>::dispatch(call);
  }
  return from_list<typename Op::Result>(
      OpFunction<Op>::apply(at::TensorList(tensors_of(call)), call));
}

}  // namespace torch_overlap::ops
