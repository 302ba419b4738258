#include "torch_overlap/gemm/sm90/arrivals.h"

#include <ATen/cuda/CUDAContextLight.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/common/cuda/stream.h"
#include "torch_overlap/gemm/sm90/params.h"

namespace torch_overlap::sm90 {
namespace {

constexpr int64_t kCountsAtOnce = 64;

struct Counts {
  c10::DeviceIndex device;
  uint32_t* words;
};

struct AllCounts {
  std::mutex mutex;
  std::map<c10::DeviceIndex, std::vector<uint32_t*>> free;
  std::map<std::pair<c10::DeviceIndex, cudaStream_t>, uint32_t*> by_stream;
};

// Never destroyed: CUDA may be gone before it would be.
AllCounts& all_counts() {
  static auto* const all = new AllCounts;
  return *all;
}

// Of whole lines: kernels do not meet in one.
int64_t words_of_counts() {
  constexpr int64_t kLineWords = 32;
  const int64_t blocks = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  return (blocks * kMultiplyingWarps + kLineWords - 1) / kLineWords * kLineWords;
}

// By a stream of their own, for which the host waits: not part of a capture, and before every
// kernel that uses them.
std::vector<uint32_t*> make_counts(c10::DeviceIndex device) {
  const cuda::RelaxedCapture relaxed;  // this thread may capture, or another one
  const int64_t words = words_of_counts();
  const size_t bytes = static_cast<size_t>(kCountsAtOnce * words) * sizeof(uint32_t);
  void* memory = nullptr;
  cuda::check(cudaMalloc(&memory, bytes), "gemm: memory for counts");
  const cuda::OwnedStream stream(device, /*high_priority=*/true);
  cuda::check(cudaMemsetAsync(memory, 0, bytes, stream.get()), "gemm: setting counts");
  cuda::check(cudaStreamSynchronize(stream.get()), "gemm: setting counts");
  std::vector<uint32_t*> made;
  for (int64_t i = 0; i < kCountsAtOnce; ++i) {
    made.push_back(static_cast<uint32_t*>(memory) + i * words);
  }
  return made;
}

uint32_t* take(c10::DeviceIndex device) {
  AllCounts& all = all_counts();
  while (true) {
    {
      const std::lock_guard lock(all.mutex);
      std::vector<uint32_t*>& free = all.free[device];
      if (!free.empty()) {
        uint32_t* const words = free.back();
        free.pop_back();
        return words;
      }
    }
    // Not under the lock, which give_back() takes on a thread of the driver.
    const auto made = make_counts(device);
    const std::lock_guard lock(all.mutex);
    std::vector<uint32_t*>& free = all.free[device];
    free.insert(free.end(), made.begin(), made.end());
  }
}

// No replay uses them any more.
void give_back(void* counts) {
  const std::unique_ptr<Counts> mine(static_cast<Counts*>(counts));
  AllCounts& all = all_counts();
  const std::lock_guard lock(all.mutex);
  all.free[mine->device].push_back(mine->words);
}

}  // namespace

uint32_t* arrivals_for(c10::cuda::CUDAStream stream) {
  const c10::DeviceIndex device = stream.device_index();
  if (const cuda::Capture capture = cuda::capture_of(stream)) {
    auto mine = std::make_unique<Counts>(device, take(device));
    uint32_t* const words = mine->words;
    cuda::on_graph_death(capture.graph, give_back, mine.release());
    return words;
  }
  AllCounts& all = all_counts();
  const std::pair key(device, stream.stream());
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.by_stream.find(key);
    if (found != all.by_stream.end()) return found->second;
  }
  // Of two threads on one stream the second gives its own back.
  uint32_t* const words = take(device);
  const std::lock_guard lock(all.mutex);
  const auto [place, is_first] = all.by_stream.try_emplace(key, words);
  if (!is_first) all.free[device].push_back(words);
  return place->second;
}

}  // namespace torch_overlap::sm90
