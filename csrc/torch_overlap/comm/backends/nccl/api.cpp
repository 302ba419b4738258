#include "torch_overlap/comm/backends/nccl/api.h"

#include "torch_overlap/base/env.h"

// Functions newer than the oldest NCCL that may be loaded; null if it does not have them.
extern "C" {
__attribute__((weak)) ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags);
__attribute__((weak)) ncclResult_t ncclCommShrink(ncclComm_t comm, int* excluded, int count,
                                                  ncclComm_t* child, ncclConfig_t* config,
                                                  int flags);
__attribute__((weak)) ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* data, size_t bytes,
                                                          ncclWindow_t* window, int flags);
__attribute__((weak)) ncclResult_t ncclPutSignal(const void* source, size_t count,
                                                 ncclDataType_t type, int peer, ncclWindow_t window,
                                                 size_t offset, int signal, int context,
                                                 unsigned int flags, ncclComm_t comm,
                                                 cudaStream_t stream);
}

namespace torch_overlap {

NcclApi::NcclApi()
    : comm_revoke(ncclCommRevoke),
      comm_shrink(ncclCommShrink),
      comm_window_register(ncclCommWindowRegister),
      put_signal(ncclPutSignal),
      is_nvls_enabled(Env::is_nvls_enabled()),
      is_graph_register_enabled(Env::is_graph_register_enabled()) {}

const NcclApi& NcclApi::loaded() {
  static const NcclApi* const api = new NcclApi;  // never freed: threads use it to the very end
  return *api;
}

int NcclApi::version() const {
  int version = 0;
  nccl_check(*this, get_version(&version), "ncclGetVersion");
  return version;
}

std::string nccl_version_string(int version) {
  if (version < 10'000) {  // up to 2.8, for example 2804
    return concat(version / 1000, ".", version % 1000 / 100, ".", version % 100);
  }
  return concat(version / 10'000, ".", version % 10'000 / 100, ".", version % 100);
}

void require_nccl(const NcclApi& api, int needed, std::string_view what) {
  const int loaded = api.version();
  TORCH_OVERLAP_CHECK(loaded >= needed, kUnsupported, what, ": expected NCCL ",
                      nccl_version_string(needed), " or newer, got ", nccl_version_string(loaded),
                      " (built with ", nccl_version_string(NCCL_VERSION_CODE),
                      "); install a newer nvidia-nccl wheel, or leave the feature out");
}

void throw_nccl_error(const NcclApi& api, ncclResult_t result, std::string_view what) {
  const char* last = api.last_error(nullptr);
  throw NcclError(
      result,
      concat(what, ": expected success from NCCL, got ", api.error_string(result),
             last != nullptr && *last != '\0' ? "; NCCL says: " : "", last != nullptr ? last : ""));
}

}  // namespace torch_overlap
