#pragma once

#include <cstdint>

#include "torch_overlap/overlap/config.h"
#include "torch_overlap/overlap/schedule.h"

// Layout of the scratch memory after the buffer of a class in its channel.
namespace torch_overlap {

// Number of elements per fp32 block scale. The E8M0 scales of this many elements have the same size
// in bytes.
constexpr int64_t kElementsPerScale = 128;

// Returns the offset in bytes of the scratch memory.
inline int64_t scratch_offset(const CommOverlapConfig& config) {
  constexpr int64_t kAlignment = 256;
  return (static_cast<int64_t>(config.bytes()) + kAlignment - 1) / kAlignment * kAlignment;
}

// Returns the size of the scratch memory. RING_EXCHANGE: the partial sums that other ranks send, or
// the block scales of gathered 8-bit rows.
inline int64_t scratch_bytes(const CommOverlapConfig& config) {
  if (config.method != CommOverlapMethod::RING_EXCHANGE) return 0;
  const RowPartition rows{config.buffer_shape[0], config.tp_size};
  const int64_t all_rows = config.tp_size * rows.largest();
  const auto element = static_cast<int64_t>(c10::elementSize(config.buffer_dtype));
  const int64_t features = config.buffer_shape[1];
  if (config.comm_type == CommOverlapType::RS) return all_rows * features * element;
  if (element > 1) return 0;
  const int64_t scales = (features + kElementsPerScale - 1) / kElementsPerScale;
  return all_rows * scales * static_cast<int64_t>(sizeof(float));
}

}  // namespace torch_overlap
