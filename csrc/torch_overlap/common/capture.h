#pragma once

#include <c10/core/Device.h>

#include <string_view>

#include "torch_overlap/base/export.h"

namespace torch_overlap {

// Whether a graph captures the calling thread's current stream of `device`, a capture that an error
// has broken included. Never throws: what is wrong with a device, the call itself will find.
TORCH_OVERLAP_API bool is_capturing(c10::Device device);

// For what a graph cannot hold: throws kState, naming `op`, if so. `because`: what is not plain.
TORCH_OVERLAP_API void refuse_capture(std::string_view op, c10::Device device,
                                      std::string_view because = {});

// How to ask a kind of device; one that nobody has registered never captures.
using CaptureProbe = bool (*)(c10::DeviceIndex device) noexcept;
TORCH_OVERLAP_API void register_capture_probe(c10::DeviceType type, CaptureProbe probe);

// For use at namespace scope.
struct TORCH_OVERLAP_API CaptureProbeRegistration {
  CaptureProbeRegistration(c10::DeviceType type, CaptureProbe probe) {
    register_capture_probe(type, probe);
  }
};

}  // namespace torch_overlap
