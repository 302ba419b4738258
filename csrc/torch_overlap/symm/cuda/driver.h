#pragma once

#include <cuda.h>

#include <string_view>

namespace torch_overlap::cuda {

// The driver's functions for virtual memory. They are looked up in the loaded driver, never linked:
// the library must load on machines without a driver.
struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_address;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuMemRetainAllocationHandle) handle_of;
  decltype(&cuMemGetAllocationPropertiesFromHandle) properties_of;
  decltype(&cuMemGetAddressRange) range_of;
  decltype(&cuGetErrorString) error_string;
  decltype(&cuDeviceGet) device;
  decltype(&cuDeviceGetAttribute) attribute_of;

  // Throws kUnsupported if the driver lacks one of them.
  static const Driver& loaded();
  void check(CUresult status, std::string_view what) const;
};

}  // namespace torch_overlap::cuda
