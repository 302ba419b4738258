
#include "torch_overlap/overlap/cpu/host_streams.h"
#include "torch_overlap/overlap/cpu/transport.h"

namespace torch_overlap {
namespace {

class CpuOverlapDevice final : public OverlapDevice {
 public:
  std::unique_ptr<OverlapStreams> make_streams(c10::Device, const StreamOptions& options) override {
    return std::make_unique<HostStreams>(options.num_compute_streams);
  }

  std::unique_ptr<Transport> make_transport(std::shared_ptr<SymmetricMemory> memory,
                                            const PeerMappedOptions& options) override {
    return std::make_unique<CpuTransport>(std::move(memory), options);
  }

  void sum(const SumArgs& args) override {
    const auto dtype = args.out.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    auto total = args.parts.at(0).to(dtype, /*non_blocking=*/false, /*copy=*/true);
    for (size_t i = 1; i < args.parts.size(); ++i) total.add_(args.parts[i].to(dtype));
    if (args.scale_inv.defined()) total.mul_(args.scale_inv.to(dtype));
    if (args.factor != 1) total.mul_(args.factor);
    if (args.bias.defined()) total.add_(args.bias.to(dtype));
    args.out.copy_(total);
  }

  std::string name(c10::Device) override { return "cpu"; }
  int sm_count(c10::Device) override { return 0; }
  uint64_t capture() override { return 0; }
  void keep_for_graph(std::vector<std::shared_ptr<void>>) override {}
};

const OverlapDeviceRegistration cpu_overlap_registration(c10::kCPU,
                                                         std::make_shared<CpuOverlapDevice>());

}  // namespace
}  // namespace torch_overlap
