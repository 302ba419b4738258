#include "torch_overlap/comm/backends/fake/fake_backend.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "torch_overlap/base/errors.h"
#include "torch_overlap/comm/backends/fake/fake_primitives.h"
#include "torch_overlap/comm/host/host_work.h"

namespace torch_overlap {

FakeBackend::FakeBackend(const BackendContext& context) : context_(context) {
  warn_unknown_hints(context.options.hints, "fake");
}

WorkPtr FakeBackend::issue(Call call) {
  TORCH_OVERLAP_CHECK(!is_aborted(), kState, to_string(call.name),
                      ": expected a live communicator, got '", context_.name,
                      "', which was aborted");
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    FakePrimitives(context_.rank, context_.size).run(call);
  }
  return HostWork::completed(std::move(call));
}

std::shared_ptr<Backend> FakeBackend::split(const SplitRequest& request) {
  return request.member ? std::make_shared<FakeBackend>(request.child) : nullptr;
}

}  // namespace torch_overlap
