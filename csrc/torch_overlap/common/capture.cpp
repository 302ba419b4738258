#include "torch_overlap/common/capture.h"

#include <array>
#include <atomic>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

std::atomic<CaptureProbe>& probe_of(c10::DeviceType type) {
  static std::array<std::atomic<CaptureProbe>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> probes{};
  return probes.at(static_cast<size_t>(type));
}

}  // namespace

bool is_capturing(c10::Device device) {
  const CaptureProbe probe = probe_of(device.type()).load(std::memory_order_acquire);
  return probe != nullptr && probe(device.index());
}

void check_not_capturing(std::string_view op, c10::Device device, std::string_view because) {
  TORCH_OVERLAP_CHECK(!is_capturing(device), kState, op,
                      ": expected a stream that is not capturing, got one that is",
                      because.empty() ? "" : ": ", because, "; call it outside of graph captures");
}

void register_capture_probe(c10::DeviceType type, CaptureProbe probe) {
  probe_of(type).store(probe, std::memory_order_release);
}

}  // namespace torch_overlap
