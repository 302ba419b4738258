#pragma once

#include <string_view>
#include <tuple>

// The fields of an operator, listed once in the order of its schema (schema.h), and those that its
// gradient needs (autograd.h): as references, of a call that may change or not.
#define TORCH_OVERLAP_FIELDS(...)                       \
  auto fields() { return std::tie(__VA_ARGS__); }       \
  auto fields() const { return std::tie(__VA_ARGS__); } \
  static constexpr std::string_view kFieldNames = #__VA_ARGS__

#define TORCH_OVERLAP_SAVED(...)                 \
  auto saved() { return std::tie(__VA_ARGS__); } \
  auto saved() const { return std::tie(__VA_ARGS__); }
