#include "torch_overlap/gemm/scaling.h"

#include <array>
#include <iterator>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

constexpr std::array<std::string_view, 7> kScalingModes{
    "NO_SCALING",       "DELAYED_TENSOR_SCALING", "MXFP8_1D_SCALING", "CURRENT_TENSOR_SCALING",
    "BLOCK_1D_SCALING", "BLOCK_2D_SCALING",       "ROW_SCALING"};

}  // namespace

std::string_view to_string(ScalingMode mode) {
  const auto index = static_cast<size_t>(mode);
  return index < kScalingModes.size() ? kScalingModes[index] : "unknown scaling mode";
}

ScalingMode scaling_mode(std::string_view op, int64_t value) {
  if (value >= 0 && value < std::ssize(kScalingModes)) return static_cast<ScalingMode>(value);
  std::string modes;
  for (size_t i = 0; i < kScalingModes.size(); ++i) {
    modes += concat(modes.empty() ? "" : ", ", kScalingModes[i], " = ", i);
  }
  fail(ErrorKind::kValue, op, ": expected a scaling mode, got ", value, "; use one of ", modes);
}

}  // namespace torch_overlap
