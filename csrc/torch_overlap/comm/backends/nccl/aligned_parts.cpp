#include "torch_overlap/comm/backends/nccl/aligned_parts.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap {

AlignedParts::AlignedParts(cuda::CollectiveParams& params, cudaStream_t stream) : stream_(stream) {
  for (int r = 0; r < params.size; ++r) {
    const char*& part = params.send[r];
    const size_t bytes = params.send_bytes[r];
    if (params.has_single_source && r > 0) {
      part = params.send[0];
      continue;
    }
    if (char* const staged = stage_if_unaligned(part, bytes)) {
      copy({staged, part, bytes});
      part = staged;
    }
  }
  for (int r = 0; r < params.size; ++r) {
    char*& part = params.recv[r];
    const size_t bytes = params.recv_bytes[r];
    if (char* const staged = stage_if_unaligned(part, bytes)) {
      copies_back_.push_back({part, staged, bytes});
      part = staged;
    }
  }
}

void AlignedParts::copy_back() const {
  std::for_each(copies_back_.begin(), copies_back_.end(), [this](const Copy& back) { copy(back); });
}

// Returns null if the part needs no buffer. One buffer per part, even if it is read and written.
char* AlignedParts::stage_if_unaligned(const char* part, size_t bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(part);
  if (bytes == 0 || bits % CollectiveGeometry::kVectorBytes == 0) return nullptr;
  auto found = std::find_if(
      staging_buffers_.begin(), staging_buffers_.end(),
      [&](const StagingBuffer& staged) { return staged.of == part && staged.bytes == bytes; });
  if (found == staging_buffers_.end()) {
    const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCUDA);
    staging_buffers_.push_back({part, bytes, at::empty({static_cast<int64_t>(bytes)}, options)});
    found = std::prev(staging_buffers_.end());
  }
  return static_cast<char*>(found->memory.data_ptr());
}

void AlignedParts::copy(const Copy& what) const {
  cuda::check(cudaMemcpyAsync(what.to, what.from, what.bytes, cudaMemcpyDeviceToDevice, stream_),
              "custom collectives: copying a tensor that is not aligned to 16 bytes");
}

}  // namespace torch_overlap
