#include "torch_overlap/comm/backends/fake/fake_backend.h"

namespace torch_overlap {
namespace {

const BackendRegistration fake_registration(
    "fake", {.make = [](const BackendContext& context) -> std::shared_ptr<Backend> {
               return std::make_shared<FakeBackend>(context);
             },
             .devices = {c10::kCPU, c10::kCUDA, c10::kMeta},
             .has_peers = false,
             .check_hints = [](const Hints& hints) { warn_unknown_hints(hints, "fake"); }});

}  // namespace
}  // namespace torch_overlap
