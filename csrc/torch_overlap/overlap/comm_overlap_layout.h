#pragma once

#include <cstdint>

#include "torch_overlap/overlap/config.h"
#include "torch_overlap/overlap/schedule.h"

// What lies behind the buffer of a class in its channel.
namespace torch_overlap {

// Elements that an fp32 scale of blocks is for; the E8M0 scales of as many take as many bytes.
constexpr int64_t kElementsOfScale = 128;

// Where it begins.
inline int64_t behind_buffer(const CommOverlapConfig& config) {
  constexpr int64_t kAlignment = 256;
  return (static_cast<int64_t>(config.bytes()) + kAlignment - 1) / kAlignment * kAlignment;
}

// For RING_EXCHANGE: the parts of a sum that other ranks send, or the block scales of gathered
// 8-bit rows.
inline int64_t bytes_behind_buffer(const CommOverlapConfig& config) {
  if (config.method != CommOverlapMethod::RING_EXCHANGE) return 0;
  const RowShare rows{config.buffer_shape[0], config.tp_size};
  const int64_t all_rows = config.tp_size * rows.largest();
  const auto element = static_cast<int64_t>(c10::elementSize(config.buffer_dtype));
  const int64_t features = config.buffer_shape[1];
  if (config.comm_type == CommOverlapType::RS) return all_rows * features * element;
  if (element > 1) return 0;
  const int64_t scales = (features + kElementsOfScale - 1) / kElementsOfScale;
  return all_rows * scales * static_cast<int64_t>(sizeof(float));
}

}  // namespace torch_overlap
