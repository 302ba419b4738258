#include "torch_overlap/symm/cuda/driver.h"

#include <cuda_runtime_api.h>

#include "torch_overlap/base/errors.h"

namespace torch_overlap::cuda {
namespace {

// Looks up a function in its form of CUDA version `since`: that of the declarations above.
template <typename Function>
void find(const char* name, Function& function, unsigned int since) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &found, since, cudaEnableDefault, &result);
  if (status != cudaSuccess) (void)cudaGetLastError();
  TORCH_OVERLAP_CHECK(status == cudaSuccess && result == cudaDriverEntryPointSuccess, kUnsupported,
                      "symmetric memory: expected a CUDA driver with ", name,
                      ", got one without it; update the driver");
  function = reinterpret_cast<Function>(found);
}

}  // namespace

const Driver& Driver::loaded() {
  static const Driver driver = [] {
    constexpr unsigned int kVirtualMemory = 10020;
    Driver out{};
    find("cuMemGetAllocationGranularity", out.granularity, kVirtualMemory);
    find("cuMemCreate", out.create, kVirtualMemory);
    find("cuMemRelease", out.release, kVirtualMemory);
    find("cuMemAddressReserve", out.reserve, kVirtualMemory);
    find("cuMemAddressFree", out.free_address, kVirtualMemory);
    find("cuMemMap", out.map, kVirtualMemory);
    find("cuMemUnmap", out.unmap, kVirtualMemory);
    find("cuMemSetAccess", out.set_access, kVirtualMemory);
    find("cuMemExportToShareableHandle", out.export_handle, kVirtualMemory);
    find("cuMemImportFromShareableHandle", out.import_handle, kVirtualMemory);
    find("cuMemGetAllocationPropertiesFromHandle", out.properties_of, kVirtualMemory);
    find("cuMemRetainAllocationHandle", out.handle_of, 11000);
    find("cuMemGetAddressRange", out.range_of, 3020);
    find("cuGetErrorString", out.error_string, 6000);
    find("cuDeviceGet", out.device, 2000);
    find("cuDeviceGetAttribute", out.attribute_of, 2000);
    return out;
  }();
  return driver;
}

void Driver::check(CUresult status, std::string_view what) const {
  if (__builtin_expect(status == CUDA_SUCCESS, 1)) return;
  const char* text = nullptr;
  (void)error_string(status, &text);
  fail(ErrorKind::kRuntime, what, ": expected success from the CUDA driver, got ",
       text != nullptr ? text : "an unknown error", " (", static_cast<int>(status), ")");
}

}  // namespace torch_overlap::cuda
