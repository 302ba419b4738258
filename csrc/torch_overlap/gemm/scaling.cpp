#include "torch_overlap/gemm/scaling.h"

#include <array>
#include <utility>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

constexpr std::array<std::pair<ScalingMode, std::string_view>, 7> kScalingModes{{
    {ScalingMode::NO_SCALING, "NO_SCALING"},
    {ScalingMode::DELAYED_TENSOR_SCALING, "DELAYED_TENSOR_SCALING"},
    {ScalingMode::MXFP8_1D_SCALING, "MXFP8_1D_SCALING"},
    {ScalingMode::CURRENT_TENSOR_SCALING, "CURRENT_TENSOR_SCALING"},
    {ScalingMode::BLOCK_1D_SCALING, "BLOCK_1D_SCALING"},
    {ScalingMode::BLOCK_2D_SCALING, "BLOCK_2D_SCALING"},
    {ScalingMode::ROW_SCALING, "ROW_SCALING"},
}};

}  // namespace

std::string_view to_string(ScalingMode mode) {
  for (const auto& [known, name] : kScalingModes) {
    if (known == mode) return name;
  }
  return "unknown scaling mode";
}

ScalingMode scaling_mode(std::string_view op, int64_t value) {
  for (const auto& [mode, name] : kScalingModes) {
    if (static_cast<int64_t>(mode) == value) return mode;
  }
  std::string modes;
  for (const auto& [mode, name] : kScalingModes) {
    modes += concat(modes.empty() ? "" : ", ", name, " = ", static_cast<int64_t>(mode));
  }
  fail(ErrorKind::kValue, op, ": expected a scaling mode, got ", value, "; use one of ", modes);
}

}  // namespace torch_overlap
