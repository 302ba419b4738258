#include "torch_overlap/base/strings.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <iomanip>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

template <typename Number>
Number parse_number(std::string_view text, std::string_view what, std::string_view kind) {
  Number value{};
  const char* end = text.data() + text.size();
  auto [stop, code] = std::from_chars(text.data(), end, value);
  TORCH_OVERLAP_CHECK(code == std::errc() && stop == end && !text.empty(), kValue, what,
                      ": expected ", kind, ", got '", text, "'");
  return value;
}

}  // namespace

std::string seconds_string(std::chrono::duration<double> duration) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << duration.count() << " s";
  return out.str();
}

std::string to_lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

std::vector<std::string> split_string(std::string_view text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (true) {
    const size_t end = text.find(separator, begin);
    parts.emplace_back(text.substr(begin, end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

bool parse_bool(std::string_view text, std::string_view what) {
  const std::string lower = to_lower(text);
  for (const char* yes : {"1", "true", "yes", "y", "on"}) {
    if (lower == yes) return true;
  }
  for (const char* no : {"0", "false", "no", "n", "off"}) {
    if (lower == no) return false;
  }
  fail(ErrorKind::kValue, what, ": expected true or false, got '", text, "'");
}

long long parse_int(std::string_view text, std::string_view what) {
  return parse_number<long long>(text, what, "an integer");
}

double parse_double(std::string_view text, std::string_view what) {
  const auto value = parse_number<double>(text, what, "a number");
  TORCH_OVERLAP_CHECK(std::isfinite(value), kValue, what, ": expected a finite number, got ", text);
  return value;
}

}  // namespace torch_overlap
