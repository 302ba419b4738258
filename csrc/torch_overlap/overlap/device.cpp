#include "torch_overlap/overlap/device.h"

#include <map>
#include <mutex>
#include <utility>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/base/process.h"

namespace torch_overlap {
namespace {

struct Devices {
  ForkSafeMutex mutex;
  std::map<c10::DeviceType, std::shared_ptr<OverlapDevice>> by_type;
};

Devices& devices() { return LeakySingleton<Devices>::get(); }

}  // namespace

std::shared_ptr<OverlapDevice> register_overlap_device(c10::DeviceType type,
                                                       std::shared_ptr<OverlapDevice> device) {
  const std::lock_guard lock(devices().mutex);
  return std::exchange(devices().by_type[type], std::move(device));
}

void OverlapDevice::run_fused(Transport&, const FusedGather&) {
  fail(ErrorKind::kUnsupported, "all-gather and product: expected a device with fused kernels");
}

void OverlapDevice::run_fused(Transport&, const FusedReduceScatter&) {
  fail(ErrorKind::kUnsupported, "product and reduce-scatter: expected a device with fused kernels");
}

void OverlapDevice::run_fused(Transport&, const FusedAllReduce&) {
  fail(ErrorKind::kUnsupported, "product and all-reduce: expected a device with fused kernels");
}

void OverlapDevice::run_low_latency(Transport&, const LowLatencySum&) {
  fail(ErrorKind::kUnsupported, "sum: expected a device with a kernel for it");
}

void OverlapDevice::run_low_latency(Transport&, const LowLatencyGather&) {
  fail(ErrorKind::kUnsupported, "all-gather: expected a device with a kernel for it");
}

OverlapDevice& overlap_device(std::string_view op, c10::DeviceType type) {
  const std::lock_guard lock(devices().mutex);
  const auto found = devices().by_type.find(type);
  TORCH_OVERLAP_CHECK(found != devices().by_type.end(), kUnsupported, op,
                      ": expected a device that overlapped operations run on, got ",
                      c10::DeviceTypeName(type, /*lower_case=*/true),
                      "; this build has none for it");
  return *found->second;
}

}  // namespace torch_overlap
