#pragma once

#include <string_view>

namespace torch_overlap::mesh {

// Returns the text without leading and trailing spaces.
inline std::string_view trim_spaces(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

}  // namespace torch_overlap::mesh
