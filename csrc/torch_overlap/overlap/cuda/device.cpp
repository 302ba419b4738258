#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/backends/nccl/deferred_deleter.h"
#include "torch_overlap/common/cuda/capture.h"
#include "torch_overlap/common/cuda/check.h"
#include "torch_overlap/overlap/cuda/fused_host.h"
#include "torch_overlap/overlap/cuda/fused_operands.h"
#include "torch_overlap/overlap/cuda/kernels.h"
#include "torch_overlap/overlap/cuda/low_latency_host.h"
#include "torch_overlap/overlap/cuda/resident_kernel_lock.h"
#include "torch_overlap/overlap/cuda/streams.h"
#include "torch_overlap/overlap/cuda/transport.h"

namespace torch_overlap {
namespace {

cuda::SumType sum_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return cuda::SumType::f64;
    case at::kFloat:
      return cuda::SumType::f32;
    case at::kHalf:
      return cuda::SumType::f16;
    case at::kBFloat16:
      return cuda::SumType::bf16;
    case at::kFloat8_e4m3fn:
      return cuda::SumType::e4m3;
    case at::kFloat8_e5m2:
      return cuda::SumType::e5m2;
    default:
      fail(ErrorKind::kType, "sum: expected a floating-point tensor, got ", dtype);
  }
}

class KeptByGraph final : public PendingDelete {
 public:
  explicit KeptByGraph(std::vector<std::shared_ptr<void>> what)
      : PendingDelete(c10::cuda::current_device()), what_(std::move(what)) {}
  bool can_delete() noexcept override { return true; }

 private:
  const std::vector<std::shared_ptr<void>> what_;
};

class CudaOverlapDevice final : public OverlapDevice {
 public:
  std::unique_ptr<OverlapStreams> make_streams(c10::Device device,
                                               const StreamOptions& options) override {
    return std::make_unique<cuda::CudaStreams>(device.index(), options);
  }

  std::unique_ptr<Transport> make_transport(std::shared_ptr<SymmetricMemory> memory,
                                            const PeerMappedOptions& options) override {
    return std::make_unique<cuda::CudaTransport>(std::move(memory), options);
  }

  void sum(const SumArgs& args) override {
    const int64_t rows = args.out.size(0);
    const int64_t columns = args.out.size(1);
    if (rows == 0 || columns == 0) return;
    TORCH_OVERLAP_CHECK(args.parts.size() <= cuda::kMaxRanks, kUnsupported,
                        "sum: expected at most ", cuda::kMaxRanks, " parts, got ",
                        args.parts.size());
    TORCH_OVERLAP_CHECK(!args.bias.defined() || args.bias.is_contiguous(), kValue,
                        "sum: expected a contiguous bias, got strides ", args.bias.strides());
    cuda::SumParams params{};
    for (const auto& part : args.parts) {
      params.parts[params.count] = part.const_data_ptr();
      params.part_stride[params.count++] = part.stride(0);
    }
    params.out = args.out.mutable_data_ptr();
    params.out_stride = args.out.stride(0);
    params.rows = rows;
    params.columns = columns;
    params.scale_inv = args.scale_inv.defined() ? args.scale_inv.const_data_ptr<float>() : nullptr;
    params.factor = args.factor;
    params.bias = args.bias.defined() ? args.bias.const_data_ptr() : nullptr;
    params.part_type = sum_type(args.parts.at(0).scalar_type());
    params.out_type = sum_type(args.out.scalar_type());
    const auto* properties = at::cuda::getDeviceProperties(args.out.device().index());
    const int cluster = properties->major >= 9 ? args.cluster : 1;
    cuda::check(cuda::launch_sum(params, args.blocks, cluster,
                                 c10::cuda::getCurrentCUDAStream(args.out.device().index())),
                "sum");
  }

  std::string fused_unsupported_reason(const FusedShape& shape) override {
    return cuda::fused_unsupported_reason(shape);
  }
  int num_gather_senders(const FusedGather& problem) const override {
    return cuda::num_gather_senders(problem, cuda::sm_count(problem.own.device()));
  }
  int num_reduce_scatter_pieces(const Transport& transport, const FusedReduceScatter& problem,
                                int most) const override {
    const auto& mapped = dynamic_cast<const cuda::CudaTransport&>(transport);
    if (!mapped.uses_copy_engine()) return 0;
    return cuda::num_reduce_scatter_pieces(problem, most, cuda::sm_count(problem.out.device()));
  }
  int64_t required_fused_allreduce_bytes(const FusedShape& shape) const override {
    return cuda::required_fused_allreduce_bytes(shape);
  }
  bool should_fuse_allreduce(const FusedShape& shape, int sms) const override {
    return cuda::should_fuse_allreduce(shape, sms);
  }
  void run_fused(Transport& transport, const FusedAllReduce& problem) override {
    cuda::run_fused(dynamic_cast<cuda::CudaTransport&>(transport), problem);
  }
  void run_fused(Transport& transport, const FusedGather& problem) override {
    cuda::run_fused(dynamic_cast<cuda::CudaTransport&>(transport), problem);
  }
  void run_fused(Transport& transport, const FusedReduceScatter& problem) override {
    cuda::run_fused(dynamic_cast<cuda::CudaTransport&>(transport), problem);
  }
  bool has_kernel(const LowLatencySum& sum) const override {
    return cuda::has_low_latency_kernel(sum);
  }
  bool has_kernel(const LowLatencyGather&) const override { return true; }
  void run_low_latency(Transport& transport, const LowLatencySum& sum) override {
    cuda::run_low_latency(dynamic_cast<cuda::CudaTransport&>(transport), sum);
  }
  void run_low_latency(Transport& transport, const LowLatencyGather& gather) override {
    cuda::run_low_latency(dynamic_cast<cuda::CudaTransport&>(transport), gather);
  }
  int tiles() const override { return cuda::kMaxTileFlags; }

  std::string name(c10::Device device) override {
    return at::cuda::getDeviceProperties(device.index())->name;
  }

  int sm_count(c10::Device device) override { return cuda::sm_count(device); }

  std::shared_ptr<void> acquire_resident_kernel_lock(c10::Device device) override {
    return cuda::acquire_resident_kernel_lock(device.index());
  }

  uint64_t capture() override {
    return cuda::capture_of(c10::cuda::getCurrentCUDAStream().stream()).id;
  }

  void keep_for_graph(std::vector<std::shared_ptr<void>> what) override {
    start_deferred_deleter();
    const auto capture = cuda::capture_of(c10::cuda::getCurrentCUDAStream().stream());
    cuda::on_graph_destroyed(
        capture.graph, [](void* body) { defer(static_cast<KeptByGraph*>(body)); },
        new KeptByGraph(std::move(what)));
  }
};

const OverlapDeviceRegistration cuda_overlap_registration(c10::kCUDA,
                                                          std::make_shared<CudaOverlapDevice>());

}  // namespace
}  // namespace torch_overlap
