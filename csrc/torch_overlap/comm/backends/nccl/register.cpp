#include <c10/util/Exception.h>

#include "torch_overlap/comm/backends/nccl/backend.h"

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

const BackendRegistration nccl("nccl", {make_nccl, {c10::kCUDA}});
const BackendRegistration ncclx("ncclx", {make_ncclx, {c10::kCUDA}});

}  // namespace
}  // namespace torch_overlap
