#pragma once

#include <c10/core/Device.h>

#include <string_view>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Returns true if a graph captures the calling thread's current stream of `device`, including a
// capture that an error has invalidated. Never throws: the call itself reports an error of the
// device.
TORCH_OVERLAP_API bool is_capturing(c10::Device device);

// Throws kState, naming `op`, during such a capture, for operations that a graph cannot hold.
// `because` is the reason if it is not obvious.
TORCH_OVERLAP_API void check_not_capturing(std::string_view op, c10::Device device,
                                           std::string_view because = {});

// Query for a device type. A type without a registered probe never captures.
using CaptureProbe = bool (*)(c10::DeviceIndex device) noexcept;
TORCH_OVERLAP_API void register_capture_probe(c10::DeviceType type, CaptureProbe probe);

// For use at namespace scope.
struct TORCH_OVERLAP_API CaptureProbeRegistration {
  CaptureProbeRegistration(c10::DeviceType type, CaptureProbe probe) {
    register_capture_probe(type, probe);
  }
};

}  // namespace torch_overlap
