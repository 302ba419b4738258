#include <c10/util/Exception.h>

#include "torch_overlap/comm/backends/nccl/backend.h"
#include "torch_overlap/comm/backends/nccl/config.h"

namespace torch_overlap {
namespace {

std::shared_ptr<Backend> make_nccl(const BackendContext& context) {
  return NcclBackend::create(context, NcclApi::loaded());
}

std::shared_ptr<Backend> make_ncclx(const BackendContext& context) {
  TORCH_WARN_ONCE("backend 'ncclx': NCCLX is not here; this is plain NCCL ",
                  nccl_version_string(NcclApi::loaded().version()));
  return make_nccl(context);
}

void check_hints(const Hints& hints) {
  const NcclConfig config(NcclApi::loaded(), "", hints);
  (void)event_pool_size(hints);
  (void)graph_timeouts(hints);
}

const BackendRegistration nccl("nccl", {.make = make_nccl,
                                        .devices = {c10::kCUDA},
                                        .check_hints = check_hints});
const BackendRegistration ncclx("ncclx", {.make = make_ncclx,
                                          .devices = {c10::kCUDA},
                                          .check_hints = check_hints});

}  // namespace
}  // namespace torch_overlap
