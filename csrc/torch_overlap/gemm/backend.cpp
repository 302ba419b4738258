#include "torch_overlap/gemm/backend.h"

#include <array>

#include "torch_overlap/base/errors.h"

namespace torch_overlap {
namespace {

// Written by static initializers, before any thread uses it.
std::array<std::shared_ptr<GemmBackend>, static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)>&
gemm_backends() {
  static auto* backends = new std::array<std::shared_ptr<GemmBackend>,
                                         static_cast<size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)>;
  return *backends;
}

}  // namespace

void register_gemm_backend(c10::DeviceType type, std::shared_ptr<GemmBackend> backend) {
  gemm_backends()[static_cast<size_t>(type)] = std::move(backend);
}

GemmBackend* find_gemm_backend(c10::DeviceType type) {
  return gemm_backends()[static_cast<size_t>(type)].get();
}

GemmBackend& gemm_backend(std::string_view op, c10::DeviceType type) {
  GemmBackend* backend = find_gemm_backend(type);
  TORCH_OVERLAP_CHECK(backend != nullptr, kUnsupported, op,
                      ": expected tensors of a CPU or CUDA device, got ", type,
                      "; move them (CUDA needs a build with it, FORCE_CUDA=1)");
  return *backend;
}

}  // namespace torch_overlap
