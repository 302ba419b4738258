#include "torch_overlap/comm/backends/nccl/aligned_parts.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "torch_overlap/common/cuda/check.h"

namespace torch_overlap {

AlignedParts::AlignedParts(cuda::DirectParams& params, cudaStream_t stream) : stream_(stream) {
  for (int r = 0; r < params.size; ++r) {
    const char*& part = params.send[r];
    const size_t bytes = params.send_bytes[r];
    if (params.one_source && r > 0) {
      part = params.send[0];
      continue;
    }
    if (char* const other = stand_in(part, bytes)) {
      copy({other, part, bytes});
      part = other;
    }
  }
  for (int r = 0; r < params.size; ++r) {
    char*& part = params.recv[r];
    const size_t bytes = params.recv_bytes[r];
    if (char* const other = stand_in(part, bytes)) {
      back_.push_back({part, other, bytes});
      part = other;
    }
  }
}

void AlignedParts::copy_back() const {
  std::for_each(back_.begin(), back_.end(), [this](const Copy& back) { copy(back); });
}

// Null where it takes none. One for each part, whether it is read, written, or both.
char* AlignedParts::stand_in(const char* part, size_t bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(part);
  if (bytes == 0 || bits % DirectGeometry::kVectorBytes == 0) return nullptr;
  auto found = std::find_if(others_.begin(), others_.end(), [&](const StandIn& other) {
    return other.of == part && other.bytes == bytes;
  });
  if (found == others_.end()) {
    const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCUDA);
    others_.push_back({part, bytes, at::empty({static_cast<int64_t>(bytes)}, options)});
    found = std::prev(others_.end());
  }
  return static_cast<char*>(found->memory.data_ptr());
}

void AlignedParts::copy(const Copy& what) const {
  cuda::check(cudaMemcpyAsync(what.to, what.from, what.bytes, cudaMemcpyDeviceToDevice, stream_),
              "direct collectives: copying a tensor that is not aligned to 16 bytes");
}

}  // namespace torch_overlap
