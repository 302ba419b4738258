#pragma once

#include <chrono>
#include <cstdint>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "torch_overlap/base/export.h"

namespace c10 {
enum class ScalarType : std::int8_t;
}

namespace torch_overlap {

// Writes a dtype in Python's form, "torch.float32"; torch's own operator<< writes "Float". Defined
// in common/dtype.cpp.
TORCH_OVERLAP_API std::ostream& write_dtype(std::ostream& out, c10::ScalarType dtype);

// Writes one part of a message.
template <typename Part>
std::ostream& write_part(std::ostream& out, const Part& part) {
  if constexpr (std::is_same_v<Part, c10::ScalarType>) {
    return write_dtype(out, part);
  } else {
    return out << part;
  }
}

// Writes all parts into one string.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (write_part(out, parts), ...);
  return out.str();
}

// Returns "[1, 2, 3]" from any range of streamable values.
template <typename Range>
std::string list_string(const Range& values) {
  std::ostringstream out;
  out << '[';
  const char* separator = "";
  for (const auto& value : values) {
    write_part(out << separator, value);
    separator = ", ";
  }
  out << ']';
  return out.str();
}

// Returns text such as "12.3 s".
TORCH_OVERLAP_API std::string seconds_string(std::chrono::duration<double> duration);

TORCH_OVERLAP_API std::string to_lower(std::string_view text);
TORCH_OVERLAP_API std::vector<std::string> split_string(std::string_view text, char separator);

// Parses 1/true/yes/y/on and 0/false/no/n/off, case-insensitively. `what` names the value in the
// error.
TORCH_OVERLAP_API bool parse_bool(std::string_view text, std::string_view what);
// Parses a whole decimal number. Throws an Error that names `what` for anything else.
TORCH_OVERLAP_API long long parse_int(std::string_view text, std::string_view what);
TORCH_OVERLAP_API double parse_double(std::string_view text, std::string_view what);

}  // namespace torch_overlap
