#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>

#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/gemm/counters.h"
#include "torch_overlap/gemm/cublaslt/custom_kernel.h"
#include "torch_overlap/gemm/cublaslt/plan.h"
#include "torch_overlap/gemm/options.h"

namespace torch_overlap::cublaslt {
namespace {

constexpr int kMaxCandidates = 8;

// A launch must find its operands where the product of a whole program finds them. Small ones would
// stay in L2 after the first launch, where the weights of another layer never are.
class ColdCache {
 public:
  explicit ColdCache(const PlanKey& key) {
    const auto device = static_cast<c10::DeviceIndex>(key.device);
    const int64_t l2 = at::cuda::getDeviceProperties(device)->l2CacheSize;
    const int64_t elements = key.m * key.k + key.k * key.n;  // of one byte or more
    if (elements >= 4 * l2) return;                          // L2 then holds a small part of them
    constexpr int64_t kElementBytes = 8;
    try {
      memory_ = at::zeros({2 * l2 / kElementBytes},
                          at::TensorOptions(at::kDouble).device(at::kCUDA, device));
    } catch (const c10::OutOfMemoryError&) {
      return;
    }
  }
  bool evicts() const { return memory_.defined(); }
  int rounds() const { return evicts() ? 8 : 3; }
  int launches_per_round() const { return evicts() ? 1 : 4; }
  // Reads: lines that were written would be stored during the next launch.
  void evict() const {
    if (evicts()) (void)at::sum(memory_);
  }

 private:
  at::Tensor memory_;
};

class TimingEvent {
 public:
  TimingEvent() { cuda::check(cudaEventCreate(&event_), "cudaEventCreate"); }
  ~TimingEvent() { (void)cudaEventDestroy(event_); }
  TimingEvent(const TimingEvent&) = delete;
  TimingEvent& operator=(const TimingEvent&) = delete;

  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) {
    cuda::check(cudaEventRecord(event_, stream), "cudaEventRecord");
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace

// The result is written to scratch memory, because out may be accumulated into, or may be adjacent
// to data that others read. Other results of an epilogue (pre-activations, bias gradient, amax) are
// the same each time, and are written again by the call itself.
void Plan::measure(cublasLtHandle_t handle, const LtMatmulArgs& call, const Workspace& workspace,
                   cudaStream_t stream) {
  measured_ = true;
  const auto candidates = query(handle, kMaxCandidates);
  if (candidates.size() < 2 && gemm_tuning() != GemmTuning::kBest) return;
  const cuda::RelaxedCapture relaxed;      // another thread may be capturing
  constexpr int64_t kMaxElementBytes = 4;  // maximum size of an element of D
  const at::Tensor scratch =
      at::empty({key_.n * key_.ldd * kMaxElementBytes},
                at::TensorOptions(at::kByte).device(at::kCUDA, static_cast<int>(key_.device)));
  const ColdCache cache(key_);
  TimingEvent begin;
  TimingEvent end;
  float best = std::numeric_limits<float>::infinity();
  // True if it is the fastest so far; false also if it cannot be launched.
  const auto is_fastest = [&](const auto& again) {
    if (!again()) return false;  // the first launch also loads the kernel
    count(gemm_counters().measured);
    float fastest = std::numeric_limits<float>::infinity();
    for (int round = 0; round < cache.rounds(); ++round) {
      cache.evict();
      begin.record(stream);
      for (int i = 0; i < cache.launches_per_round(); ++i) (void)again();
      end.record(stream);
      cuda::check(cudaEventSynchronize(end.get()), "cudaEventSynchronize");
      float milliseconds = 0;
      cuda::check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()),
                  "cudaEventElapsedTime");
      fastest = std::min(fastest, milliseconds);
    }
    if (fastest >= best) return false;
    best = fastest;
    return true;
  };
  for (const auto& candidate : candidates) {
    const auto again = [&] {
      return launch(handle, call, scratch.data_ptr(), candidate, workspace, stream) ==
             CUBLAS_STATUS_SUCCESS;
    };
    if (is_fastest(again)) algorithm_ = candidate;
  }
  if (gemm_tuning() != GemmTuning::kBest) return;
  // Only kernels that the actual result allows: the scratch memory is aligned, the result may not
  // be.
  const auto product = custom_kernel_problem(call, call.d);
  if (!product) return;
  const auto on_scratch = *custom_kernel_problem(call, scratch.data_ptr());
  for (const sm90::TileShape& tile_shape : sm90::supported_tile_shapes(*product)) {
    const auto again = [&] {
      sm90::run(on_scratch, tile_shape);
      return true;
    };
    if (is_fastest(again)) custom_tile_ = tile_shape;
  }
}

}  // namespace torch_overlap::cublaslt
