#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <optional>
#include <string>

#include "torch_overlap/base/export.h"
#include "torch_overlap/comm/options.h"

namespace torch_overlap {

// What a gloo process group is made from.
struct GlooRequest {
  c10::intrusive_ptr<c10d::Store> store;  // of this communicator alone
  int rank = 0;
  int size = 1;
  Milliseconds timeout{0};
  // Where to listen: a host name or address, or a network interface; at most one is set. From the
  // hints `hostname` and `interface`, else TORCHCOMM_GLOO_HOSTNAME and TORCHCOMM_GLOO_INTERFACE.
  std::optional<std::string> hostname;
  std::optional<std::string> interface;
};

// Makes torch's ProcessGroupGloo, which the wheel ships without its headers: so Python does it when
// the package is imported. Collective; called with no lock held, on the thread that makes the
// communicator. Setting it again replaces it. Threads: any.
using GlooFactory = std::function<c10::intrusive_ptr<c10d::Backend>(const GlooRequest&)>;
TORCH_OVERLAP_API void set_gloo_factory(GlooFactory factory);

}  // namespace torch_overlap
