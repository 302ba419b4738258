#pragma once

#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "torch_overlap/base/strings.h"
#include "torch_overlap/ops/ops.h"

// The schema of an operator that operator.h describes: its name, the names and types of its fields,
// and the types of its results. Public operators have a default for each field behind group_size:
// the value that the field has in `Op{}`.
namespace torch_overlap::ops {

// The schema's name of a type.
template <typename T>
inline constexpr std::string_view kSchemaType = T::has_no_schema_type;
template <>
inline constexpr std::string_view kSchemaType<Tensor> = "Tensor";
template <>
inline constexpr std::string_view kSchemaType<std::optional<Tensor>> = "Tensor?";
template <>
inline constexpr std::string_view kSchemaType<std::vector<Tensor>> = "Tensor[]";
template <>
inline constexpr std::string_view kSchemaType<OptionalTensors> = "Tensor?[]";
template <>
inline constexpr std::string_view kSchemaType<MainGrads> = "Tensor[]?";
template <>
inline constexpr std::string_view kSchemaType<at::IntArrayRef> = "int[]";
template <>
inline constexpr std::string_view kSchemaType<std::vector<int64_t>> = "int[]";
template <>
inline constexpr std::string_view kSchemaType<std::vector<c10::SymInt>> = "SymInt[]";
template <>
inline constexpr std::string_view kSchemaType<std::optional<at::Scalar>> = "Scalar?";
template <>
inline constexpr std::string_view kSchemaType<at::ScalarType> = "ScalarType";
template <>
inline constexpr std::string_view kSchemaType<std::string_view> = "str";
template <>
inline constexpr std::string_view kSchemaType<int64_t> = "int";
template <>
inline constexpr std::string_view kSchemaType<double> = "float";
template <>
inline constexpr std::string_view kSchemaType<bool> = "bool";

template <typename T>
std::string schema_value(const T& value) {
  if constexpr (std::is_same_v<T, std::string_view>) {
    return concat('"', value, '"');
  } else if constexpr (std::is_same_v<T, at::ScalarType>) {
    return c10::getDtypeNames(value).first;
  } else if constexpr (std::is_same_v<T, bool>) {
    return value ? "True" : "False";
  } else if constexpr (std::is_arithmetic_v<T>) {
    return concat(value);
  } else {
    return "None";
  }
}

template <typename Result>
struct SchemaResult {
  static std::string text() { return std::string(kSchemaType<Result>); }
};
template <typename... Results>
struct SchemaResult<std::tuple<Results...>> {
  static std::string text() {
    std::string types;
    ((types += concat(types.empty() ? "(" : ", ", kSchemaType<Results>)), ...);
    return types + ")";
  }
};

// A field, with the value that its default would have.
struct SchemaField {
  std::string_view type;
  std::string value;
};
// `results`: the types of the results. The fields have the names `names`, "x, weight, ...".
std::string schema_text(std::string_view op, std::string_view names,
                        const std::vector<SchemaField>& fields, std::string_view results);

template <typename Op>
std::string schema_of(std::string_view name) {
  const Op call{};
  const auto fields = std::apply(
      []<typename... Fields>(const Fields&... field) {
        return std::vector<SchemaField>{{kSchemaType<Fields>, schema_value(field)}...};
      },
      call.fields());
  if constexpr (requires { Op::kResults; }) {  // named
    return schema_text(name, Op::kFieldNames, fields, Op::kResults);
  } else {
    return schema_text(name, Op::kFieldNames, fields, SchemaResult<typename Op::Result>::text());
  }
}

}  // namespace torch_overlap::ops
